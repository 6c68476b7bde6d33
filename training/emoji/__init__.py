"""Train the tiny Stable Diffusion that `txt2img` draws with when no model is named."""
