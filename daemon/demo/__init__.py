"""`stateroom demo`: a private daemon and two programs that share it.

`editor.py` and `chat.py` are plain clients, each a process of its own, and good first examples of the
library. `run.py` starts everything, shows what they print, and sums it up.
"""
