"""What outlives the daemon, in one SQLite file: sessions and their tokens, and what is known of snapshots."""
