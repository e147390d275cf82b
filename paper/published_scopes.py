"""Published plans and formulas of AMSP and PaRO: scopes for parameters, gradients and optimizer state by themselves."""

AMSP = "AMSP (arXiv 2311.00257)"
PARO = "PaRO, NeurIPS 2024 (arXiv 2310.06003)"

# AMSP: bytes a parameter of fp16 parameters, fp16 gradients, and optimizer state with the f32 copy of the parameters
BYTES = (2, 2, 12)
GPUS, GPUS_PER_NODE = 1024, 8
# AMSP's plans for 1024 GPUs: over how many GPUs parameters, gradients and optimizer state are cut; MiCS cuts all alike
PLANS = {"LLaMA-7B": (1, 1, 8), "LLaMA-13B": (4, 4, 8), "LLaMA-30B": (8, 8, 32)}
MICS_PLANS = {"LLaMA-7B": 8, "LLaMA-13B": 8, "LLaMA-30B": 16}
# PaRO's plans that are nested, for parameters, gradients, optimizer state: N not cut, I inside a node, G over all GPUs
PARO_PLANS = ("NNN", "NNI", "NNG", "NII", "NIG", "NGG", "III", "IIG", "IGG", "GGG")
PARO_WORDS = {"N": "none", "I": "node", "G": "all"}


def plan_strategy(model: str) -> str:
    """Returns AMSP's plan of a model as the name of a strategy of ours."""
    return "/".join("none" if cut == 1 else f"{cut}" for cut in PLANS[model])


def paro_strategy(letters: str) -> str:
    """Returns one of PaRO's plans as the name of a strategy of ours."""
    return "/".join(PARO_WORDS[letter] for letter in letters)
