"""What every process needs: logs, metrics, the pulse, addresses, key files.

Must not know: anything else of Headway.
"""
