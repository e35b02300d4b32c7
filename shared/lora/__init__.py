"""LoRA adapters as files, without torch: PEFT's format, identity by content, and checks that need no model."""
