"""Who asks, by key, and which requests are taken on."""
