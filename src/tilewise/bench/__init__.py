"""The benchmark: cases as data, peers found at run time, every result checked against float64 before its speed is told."""
