"""One client's work in one process: live model, batches, augmentation, scoring, diagnostics."""
