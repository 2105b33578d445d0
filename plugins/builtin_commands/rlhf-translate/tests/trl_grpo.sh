# TRL, docs/source/clis.md (the command of GRPO), Apache-2.0: its options and values.
trl grpo \
  --model_name_or_path Qwen/Qwen2.5-0.5B \
  --dataset_name HuggingFaceH4/Polaris-Dataset-53K \
  --reward_funcs accuracy_reward
