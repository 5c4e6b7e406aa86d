"""Fine-tuning jobs: uploaded lines become examples, and the adapters that come of them are served."""
