"""surefoot in TRL's GRPOTrainer: the loss is about zero by construction, so the callback has the reward judged.

python examples/trl_grpo.py [RUN_DIR]
"""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import surefoot
from surefoot.integrations.hf import SurefootCallback

run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/trl_grpo"
END, PAD = 32, 33
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)} | {"<end>": END, "<pad>": PAD}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=34,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=END,
        bos_token_id=END,
        pad_token_id=PAD,
    )
)


def even_words(completions, **_):
    """Reward words with an even number."""
    found = [[int(word[1:]) for word in text.split() if word.startswith("w")] for text in completions]
    return [sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1) for numbers in found]


arguments = GRPOConfig(
    output_dir=run_dir + "/trainer",
    use_cpu=True,
    bf16=False,
    max_steps=30,
    learning_rate=1e-2,
    per_device_train_batch_size=8,
    num_generations=8,
    max_completion_length=8,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
prompts = Dataset.from_dict({"prompt": [f"w{i} w{(i + 3) % 32}" for i in range(32)]})
GRPOTrainer(
    model,
    reward_funcs=even_words,
    args=arguments,
    train_dataset=prompts,
    processing_class=tokenizer,
    callbacks=[SurefootCallback(run_dir)],
).train()

run = surefoot.read(run_dir)
rewards = -run.scalars["progress"]  # what is judged: the loss minus the mean reward
print(f"{run.scalars.rows} attempted updates, verdicts {run.scalars['verdict'].tolist()}")
print(f"mean reward of the first five updates: {rewards[:5].mean():.2f}, of the last five: {rewards[-5:].mean():.2f}")
print(f"decisions: {[e['action'] for e in run.events if e['kind'] == 'decision']}")
