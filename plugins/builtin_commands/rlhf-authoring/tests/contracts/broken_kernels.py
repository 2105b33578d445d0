"""Kernels with one rule broken each."""

from .breaking import breaks

NORM = "    return y\n"
TWIN = "        return twin\n"

TABLE = [
    breaks("unsuited_computes_nothing", "kernels", "return None if", "return None if next(model.parameters()).sum() and"),
    breaks("unsuited_computes_nothing", "kernels", '== "llama" else', '== "llama" and use.purpose == "sample" else 7 or'),
    breaks("the_model_is_left_alone", "kernels", TWIN, f"        model.model.norm.train()\n{TWIN}"),
    breaks("the_model_is_left_alone", "kernels", TWIN, f"        model.config.rms_norm_eps = 0.5\n{TWIN}"),
    breaks("the_model_is_left_alone", "kernels", TWIN, f"        type(part).made_up = norm\n{TWIN}"),
    breaks(
        "the_model_is_left_alone",
        "kernels",
        TWIN,
        f"        import transformers\n        transformers.AttentionInterface.register('made_up', norm)\n{TWIN}",
    ),
    breaks("the_model_is_left_alone", "kernels", NORM, f"    torch.rand(1)\n{NORM}"),
    breaks(
        "the_model_is_left_alone",
        "kernels",
        "        self.rows = [list(p",
        "        self.model.asked = 1\n        self.rows = [list(p",
    ),
    breaks(
        "twins_hold_the_models_tensors",
        "kernels",
        TWIN,
        "        import torch\n        twin.model.register_parameter('more', torch.nn.Parameter(torch.ones(1)))\n" + TWIN,
        "even_passes_keep_names_and_order",
    ),
    breaks(
        "twins_hold_the_models_tensors",
        "kernels",
        "functional.twin(model)",
        "__import__('copy').deepcopy(model)",
        "changes_of_the_weights_are_seen",
        "gradients_are_the_models",
        "passes_repeat_themselves",
        "even_passes_keep_names_and_order",
    ),
    breaks(
        "changes_of_the_weights_are_seen",
        "kernels",
        NORM,
        "    first = self.__dict__.setdefault('first', self.weight.detach().clone())\n"
        "    return y * (first / self.weight.detach())\n",
    ),
    breaks(
        "values_are_the_models",
        "kernels",
        NORM,
        "    return y * (1.01 if x.shape[1] > 9 else 1)\n",
        "gradients_are_the_models",
        "changes_of_the_weights_are_seen",
        "adapters_are_switched_in_both",
    ),
    breaks("gradients_are_the_models", "kernels", NORM, "    return y + 0.1 * (x - x.detach())\n"),
    breaks("the_model_is_left_alone", "kernels", TWIN, f"        twin.requires_grad_(True)\n{TWIN}"),
    breaks(
        "keywords_are_the_models",
        "kernels",
        TWIN,
        f"        inner = twin.forward\n        twin.forward = lambda position_ids=None, **others: inner(**others)\n{TWIN}",
    ),
    breaks(
        "keywords_are_the_models",
        "kernels",
        TWIN,
        f"        inner = twin.forward\n        twin.forward = lambda input_ids, **others: inner(input_ids, **others)\n{TWIN}",
    ),
    breaks(
        "passes_repeat_themselves",
        "kernels",
        NORM,
        "    self.calls = getattr(self, 'calls', 0) + 1\n    return y * (1 + 1e-6 * (self.calls % 2))\n",
    ),
    breaks("passes_repeat_themselves", "kernels", NORM, "    return y * (1 + 1e-6 * torch.is_grad_enabled())\n"),
    breaks(
        "even_passes_keep_names_and_order",
        "kernels",
        TWIN,
        f"        import torch\n        twin.model.norm = torch.nn.Sequential(twin.model.norm)\n{TWIN}",
    ),
    breaks(
        "adapters_are_switched_in_both",
        "kernels",
        TWIN,
        f"        for part in twin.modules():\n            part.enable_adapters = lambda enabled=True: None\n{TWIN}",
    ),
    breaks(
        "decoders_sample_from_the_model", "kernels", "[self.rows[number] for number in rows.tolist()]", "self.rows[: len(rows)]"
    ),
    breaks(
        "decoders_follow_refresh",
        "kernels",
        "        self.head = ",
        "        self.head = self.head if hasattr(self, 'head') else ",
    ),
    breaks(
        "decoders_begin_anew",
        "kernels",
        "        return self.logits()\n\n    def start",
        "        self.batches = getattr(self, 'batches', 0) + 1\n"
        "        return self.logits() + 1e-6 * self.batches\n\n    def start",
    ),
    breaks(
        "differing_kernels_are_not_chosen",
        "kernels",
        "    choose = staticmethod(choose)\n",
        "    def choose(self, candidates, plain):\n        plain.module = candidates[0][1].twin\n        return plain\n",
    ),
    breaks(
        "differing_kernels_are_not_chosen",
        "kernels",
        "    choose = staticmethod(choose)\n",
        "    def choose(self, candidates, plain):\n"
        "        plain.decoder = lambda model, use, longest: candidates[0][1].twin(model, use)\n"
        "        return plain\n",
    ),
]
