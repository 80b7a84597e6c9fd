"""Who is served next, and how much: costs and queues go in, choices come out. Pure; times are arguments."""
