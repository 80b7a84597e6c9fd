"""`stateroom top`: a live view of the daemon in a terminal.

    source → Snapshot → Board (rows, rates) → frame (lines of text) → canvas (the cells that changed)
                           View (keys) ↗

Only `source` speaks to the daemon, and only `screen` knows the terminal (through Textual). What lies between
is pure: a frame is a list of lines as wide as the screen, so a test, a pipe and a terminal get the same.
"""
