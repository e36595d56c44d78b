"""Speed and acceptance of drafts on real answers.

real       the bench: with and without drafts, by adapter and task
questions  held-out questions of each adapter and task
answers    answers at a constant number of requests, and where they differ from others
"""
