"""One client's work in one process: workspace (live model, batches), augmentation, scoring,
diagnostics. May import core, config, results, data, models,
matching, coresets."""
