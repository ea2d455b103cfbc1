"""Pictures in prompts: from the parts of a request to the patches that a model reads."""
