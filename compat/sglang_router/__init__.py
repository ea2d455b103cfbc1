"""SGLang router's module names, served by Banyan."""

import sglang as sglang  # refuses to load where the real package is installed
