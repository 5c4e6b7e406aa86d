"""Training what is small beside a frozen model (adapters, scales), in pieces that fit between steps of serving."""
