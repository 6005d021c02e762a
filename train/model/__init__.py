"""Models, losses, optimizers and gradients."""
