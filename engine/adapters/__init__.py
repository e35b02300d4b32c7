"""LoRA adapters: PEFT's format, identity by content, and the tiers that they live in."""
