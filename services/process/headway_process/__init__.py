"""What every process of Headway needs: logs, metrics, the pulse, addresses, key files.

Must not know: anything else of Headway, the messages between its processes included.
"""
