"""Settings of every test: hypothesis draws the same examples in every run, so that a change alone can turn a test red.

`pytest --hypothesis-profile=explore` draws new ones.
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")
