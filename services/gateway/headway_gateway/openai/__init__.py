"""OpenAI's API over HTTP: another door to the same calls.

It owns forms: JSON bodies, events, statuses. Every decision (limits, ranges, tenants, priorities) is made by the calls
behind it. Must not know: the link to the scheduler.
"""
