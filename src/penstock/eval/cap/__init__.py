"""The CAP board: what a configuration does to Context, Accuracy and Performance, against the plain one."""
