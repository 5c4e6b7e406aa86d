"""Several models behind one server: who is in memory, who starts, who leaves."""
