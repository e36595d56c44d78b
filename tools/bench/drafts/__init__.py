"""What benches of speculation need.

injected     drafts that are right with a chosen probability
"""
