#pragma once
// A small decoder-only transformer over characters, whose blocks can be checkpointed.

#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "remat/checkpoint.h"
#include "remat/policy.h"

struct ModelOptions {
  int64_t vocabulary = 0;
  int64_t blocks = 12;
  int64_t group = 4;  // blocks in one group of Checkpointing::NestedGroups
  int64_t width = 128;
  int64_t heads = 4;
  int64_t context = 128;
  double dropout = 0.1;
  bool ties_output = false;  // the scores are products with the characters' embeddings, as in GPT-2
};

enum class Checkpointing { None, EveryBlock, NestedGroups, SaveMatmuls, SaveByName };

// Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)). (B, T, width) -> (B, T, width)
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const ModelOptions& options)
      : heads_(options.heads),
        attention_norm_(register_module("attention_norm", norm(options))),
        mlp_norm_(register_module("mlp_norm", norm(options))),
        query_key_value_(register_module("query_key_value",
                                         torch::nn::Linear(options.width, 3 * options.width))),
        projection_(register_module("projection", torch::nn::Linear(options.width, options.width))),
        attention_dropout_(
            register_module("attention_dropout", torch::nn::Dropout(options.dropout))),
        mlp_(register_module(
            "mlp", torch::nn::Sequential(torch::nn::Linear(options.width, 4 * options.width),
                                         torch::nn::GELU(),
                                         torch::nn::Linear(4 * options.width, options.width),
                                         torch::nn::Dropout(options.dropout)))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor attended = x + attention(attention_norm_(x));
    return attended + mlp_->forward(mlp_norm_(attended));
  }

 private:
  static torch::nn::LayerNorm norm(const ModelOptions& options) {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width}));
  }

  torch::Tensor attention(const torch::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    // (B, T, 3 * width) -> three of (B, heads, T, width / heads)
    const std::vector<torch::Tensor> qkv = query_key_value_(x)
                                               .view({batch, length, 3, heads_, width / heads_})
                                               .permute({2, 0, 3, 1, 4})
                                               .unbind(0);
    const torch::Tensor mixed =
        torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{},
                                            /*dropout_p=*/0.0, /*is_causal=*/true);
    // Attention has the most computation for the bytes of its result.
    const torch::Tensor named = remat::checkpoint_name(mixed, "attention");
    return attention_dropout_(projection_(named.transpose(1, 2).reshape({batch, length, width})));
  }

  int64_t heads_;
  torch::nn::LayerNorm attention_norm_, mlp_norm_;
  torch::nn::Linear query_key_value_, projection_;
  torch::nn::Dropout attention_dropout_;
  torch::nn::Sequential mlp_;
};
TORCH_MODULE(Block);

class CharTransformerImpl : public torch::nn::Module {
 public:
  CharTransformerImpl(const ModelOptions& options, Checkpointing checkpointing)
      : checkpointing_(checkpointing),
        group_(options.group),
        characters_(
            register_module("characters", torch::nn::Embedding(options.vocabulary, options.width))),
        positions_(
            register_module("positions", torch::nn::Embedding(options.context, options.width))),
        norm_(register_module("norm",
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})))),
        output_(
            options.ties_output
                ? torch::nn::Linear(nullptr)
                : register_module("output", torch::nn::Linear(options.width, options.vocabulary))) {
    for (int64_t i = 0; i < options.blocks; ++i) {
      blocks_.push_back(register_module("block" + std::to_string(i), Block(options)));
    }
  }

  // (B, T) ids -> (B, T, vocabulary) scores of the character that follows
  torch::Tensor forward(const torch::Tensor& ids) {
    torch::Tensor x = characters_(ids) + positions_(torch::arange(ids.size(1), ids.options()));
    switch (checkpointing_) {
      case Checkpointing::None:
        for (Block& block : blocks_) x = block(x);
        break;
      case Checkpointing::EveryBlock:
        x = run_checkpointed(blocks_, x);
        break;
      case Checkpointing::NestedGroups:
        for (size_t i = 0; i < blocks_.size(); i += group_) {
          const auto first = blocks_.begin() + i;
          const auto last = blocks_.begin() + std::min(i + group_, blocks_.size());
          x = remat::checkpoint({.name = "group"}, &CharTransformerImpl::run_checkpointed,
                                std::vector<Block>(first, last), x);
        }
        break;
      case Checkpointing::SaveMatmuls:
        for (Block& block : blocks_)
          x = remat::checkpoint({.name = "block", .policy = remat::save_matmuls()}, block, x);
        break;
      case Checkpointing::SaveByName:
        for (Block& block : blocks_)
          x = remat::checkpoint({.name = "block", .policy = remat::save_names({"attention"})},
                                block, x);
        break;
    }
    return scores(norm_(x), output_, characters_);
  }

  // Returns the model as a chain of stages, each with its own parts, independent of
  // `checkpointing`.
  std::vector<remat::Stage> stages() const {
    std::vector<remat::Stage> stages;
    stages.push_back(
        [characters = characters_, positions = positions_](const torch::Tensor& ids) mutable {
          return characters(ids) + positions(torch::arange(ids.size(1), ids.options()));
        });
    for (const Block& block : blocks_)
      stages.push_back([block = Block(block)](const torch::Tensor& x) mutable { return block(x); });
    stages.push_back(
        [norm = norm_, output = output_, characters = characters_](const torch::Tensor& x) mutable {
          return scores(norm(x), output, characters);
        });
    return stages;
  }

  // Returns the mean cross-entropy [nats per character].
  torch::Tensor loss(const torch::Tensor& ids, const torch::Tensor& targets) {
    return torch::cross_entropy_loss(forward(ids).flatten(0, 1), targets.flatten());
  }

 private:
  static torch::Tensor scores(const torch::Tensor& x, torch::nn::Linear& output,
                              torch::nn::Embedding& characters) {
    return output ? output(x) : torch::linear(x, characters->weight);
  }
  // Keeps the input of each block and recomputes the inside of one block at a time in backward.
  static torch::Tensor run_checkpointed(std::vector<Block> blocks, torch::Tensor x) {
    for (const Block& block : blocks) x = remat::checkpoint({.name = "block"}, block, x);
    return x;
  }

  Checkpointing checkpointing_;
  size_t group_;
  torch::nn::Embedding characters_, positions_;
  std::vector<Block> blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear output_;
};
TORCH_MODULE(CharTransformer);
