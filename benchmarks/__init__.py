"""Side by side with SQLite, LMDB, RocksDB and a plain file: the same messages, in one interleaved run.

Reading order: `protocol` (what a contestant must do), `workload` (the messages), `peers`, `measure` (the clocks),
`cases` (the work and its targets), `runner` (rounds), `stats` (ratios), `report`. `records` and `naive_dispatch` are
the textbook side of the two cases that need no peer.
"""
