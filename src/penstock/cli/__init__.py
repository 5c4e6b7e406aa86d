"""L14: the command line. Thin: it parses, calls one front end and prints."""
