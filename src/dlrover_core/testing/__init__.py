"""What proves us, and whatever is built on us: virtual time, in-memory ports, a cluster of real masters and agents in one
loop, and conformance kits for logs and backends. None of it needs pytest; the classes are written for it.
"""
