"""What a student of Headway needs: simulate, bench, replay, explain, timeline, top, doctor.

May use everything of Headway's. Nothing that serves imports it.
"""
