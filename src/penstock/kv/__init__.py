"""L3: who owns which page of the caches. Integers only: it decides copies and zeroing, the runner carries them out."""
