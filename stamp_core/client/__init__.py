"""One client's work in one process: workspace (live model, batches, scores), scores of masks
(pixels), temporal matching, personalisation, diagnostics. May import core, config, results, data,
models, matching, coresets."""
