"""What every process of Headway needs and none owns: logs, metrics, the pulse, addresses, key files.

Must not know: anything of Headway's own, the messages between its processes included.
"""
