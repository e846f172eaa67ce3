"""A file that cannot be imported, for bench/same_bits.py."""

raise RuntimeError("no licence for this simulator")
