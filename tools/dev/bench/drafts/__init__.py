"""What benches of speculation need.

injected     drafts that are right with a chosen probability
real         what drafts bring on real answers, by adapter and task
questions    held-out questions of each adapter and task
host_work    what a step costs the host, with drafts and without
answers      answers at a constant number of requests, their counts, and where they differ from others
"""
