// Functions of neural networks: modules, dropouts, norms, recurrent cells, attention, convolutions,
// losses.

#include <torch/torch.h>

#include "remat/module.h"
#include "tests/table/table.h"

namespace table {

namespace {

namespace F = torch::nn::functional;
using Kind = Exception::Kind;

constexpr const char* unwritten =
    "a pack function that copies takes what the kernel has yet to write, without regions too";
constexpr const char* never_written =
    "the operator saves what it never wrote, which Values takes for other numbers";

/// Returns leaves of these sizes, and whole numbers in [0, n) behind them.
Tensors leaves_and_whole(const Sizes& sizes, at::IntArrayRef whole_sizes, int64_t n) {
  Tensors made;
  for (const auto& each : sizes) made.push_back(leaf(each));
  made.push_back(whole(whole_sizes, n));
  return made;
}

void add_linear(std::vector<Function>& t) {
  add_module(t, "linear", {{3, 4}}, [] { return torch::nn::Linear(4, 5); });
  add_module(t, "perceptron", {{3, 4}}, [] {
    return torch::nn::Sequential(torch::nn::Linear(4, 6), torch::nn::GELU(),
                                 torch::nn::Linear(6, 4), torch::nn::Tanh());
  });
  add_module(
      t, "bilinear", {{3, 4}, {3, 2}}, [] { return torch::nn::Bilinear(4, 2, 3); },
      [](auto& m, const Tensors& a) { return m.forward(a[0], a[1]).exp(); });
  add(t, "activations_that_save_output", {{3, 4}}, [](const Tensors& a) {
    return a[0].exp().sigmoid().tanh().sqrt() + at::softmax(a[0], 1) + at::log_softmax(a[0], 0) +
           a[0].relu() + at::elu(a[0]);
  });
  add(t, "activations_that_save_input", {{3, 4}}, [](const Tensors& a) {
    return at::gelu(a[0]) + at::silu(a[0]).sin() + at::softplus(a[0]) + at::leaky_relu(a[0]) +
           at::mish(a[0]) + at::hardtanh(a[0].exp()) + at::hardswish(a[0]);
  });
  add_module(t, "prelu", {{3, 4}}, [] { return torch::nn::PReLU(); });
  add(t, "glu", {{3, 4}}, [](const Tensors& a) { return at::glu(a[0].exp(), 1).sin(); });
  add(t, "in_place_activations", {{3, 4}}, [](const Tensors& a) {
    return F::relu((a[0].sin() * 2).sigmoid_() - 0.5, F::ReLUFuncOptions(true)) * a[0];
  }).with(writes_kept);
}

void add_norms(std::vector<Function>& t) {
  add_module(t, "layer_norm", {{3, 4}},
             [] { return torch::nn::LayerNorm(std::vector<int64_t>{4}); });
  add_module(t, "group_norm", {{2, 4, 3}}, [] { return torch::nn::GroupNorm(2, 4); });
  add_module(t, "batch_norm_train", {{5, 3}},
             [] { return remat::Checkpointed<torch::nn::BatchNorm1dImpl>(3); });
  add_module(
      t, "batch_norm_2d_then_conv", {{2, 3, 4, 4}, {2, 3, 2, 2}},
      [] { return remat::Checkpointed<torch::nn::BatchNorm2dImpl>(3); },
      [](auto& m, const Tensors& a) { return at::conv2d(m.forward(a[0]).relu(), a[1]).tanh(); });
  add_module(t, "batch_norm_eval", {{5, 3}}, [] {
    torch::nn::BatchNorm1d m(3);
    m->running_mean.normal_();
    m->eval();
    return m;
  });
  add_module(t, "batch_norm_without_statistics", {{5, 3}}, [] {
    return torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(3).track_running_stats(false));
  });
  add_module(t, "instance_norm", {{2, 3, 5}}, [] {
    return torch::nn::InstanceNorm1d(torch::nn::InstanceNorm1dOptions(3).affine(true));
  });
  add(t, "rms_norm", {{3, 4}, {4}}, [](const Tensors& a) {
    return at::rms_norm(a[0].exp(), {4}, a[1]).sin();
  }).with(writes_kept);
  add(t, "local_response_norm", {{2, 4, 3}}, [](const Tensors& a) {
    return F::local_response_norm(a[0].exp(), F::LocalResponseNormFuncOptions(2)).sin();
  });
  add(t, "weight_norm", {{3, 4}, {5, 4}, {5, 1}},
      [](const Tensors& a) { return a[0].mm(at::_weight_norm(a[1], a[2], 0).t()).tanh(); });
  add(t, "normalize", {{3, 4}},
      [](const Tensors& a) { return F::normalize(a[0].exp()).sin() * a[0].norm(); });
}

void add_random(std::vector<Function>& t) {
  add(t, "dropout", {{3, 4}}, [](const Tensors& a) {
    return at::dropout(a[0].exp(), 0.4, true).sin() * a[0];
  }).with(draws);
  add(t, "alpha_dropout", {{3, 4}}, [](const Tensors& a) {
    return at::alpha_dropout(a[0].exp(), 0.4, true).sin();
  }).with(draws | writes_kept);
  add(t, "feature_dropout", {{2, 3, 4}}, [](const Tensors& a) {
    return at::feature_dropout(a[0].exp(), 0.4, true).sin();
  }).with(draws | writes_kept);
  add(t, "rrelu", {{3, 4}},
      [](const Tensors& a) { return at::rrelu(a[0].sin(), 0.1, 0.4, true).exp(); })
      .with(draws)
      .except(Kind::Skipped, "hooks_inside/*", unwritten);
  add(t, "rrelu_at_the_end", {{3, 4}},
      [](const Tensors& a) { return at::rrelu(a[0].sin(), 0.1, 0.4, true); })
      .with(draws)
      .except(Kind::Skipped, "hooks_inside/*", unwritten);
  add(t, "bernoulli", {{3, 4}}, [](const Tensors& a) {
    return at::bernoulli(a[0].detach().sigmoid()) * a[0].exp() * at::rand({4}) + at::randn({3, 4});
  }).with(draws);
  add(t, "multinomial", {{3, 5}}, [](const Tensors& a) {
    const Tensor drawn = at::multinomial(at::softmax(a[0], 1), 2);
    return a[0].exp().gather(1, drawn).sin() * at::randperm(2);
  }).with(draws);
  add(t, "random_in_place", {{3, 4}}, [](const Tensors& a) {
    const Tensor noise = at::empty({3, 4}).uniform_(0.5, 1.5).mul_(at::empty({4}).exponential_());
    return a[0].exp() * noise * at::empty({3, 4}).bernoulli_(0.7);
  }).with(draws | writes_kept);
  add(t, "gumbel_softmax", {{3, 5}}, [](const Tensors& a) {
    return F::gumbel_softmax(a[0].exp(), F::GumbelSoftmaxFuncOptions().hard(true)).sin() * a[0];
  }).with(draws);
}

template <class Module>
Tensors results_of_cell(Module& m, const Tensors& a) {
  auto [output, state] = m.forward(a[0]);
  if constexpr (std::is_same_v<decltype(state), Tensor>)
    return {output, state.exp()};
  else
    return {output, std::get<0>(state).exp(), std::get<1>(state)};
}

void add_recurrent(std::vector<Function>& t) {
  const auto run = [](auto& m, const Tensors& a) { return results_of_cell(m, a); };
  add_module(
      t, "lstm", {{4, 2, 3}}, [] { return torch::nn::LSTM(torch::nn::LSTMOptions(3, 4)); }, run)
      .with(writes_kept)
      .except(Kind::MayRaise, "check_values/*", never_written, "different contents");
  add_module(
      t, "lstm_with_dropout", {{3, 2, 3}},
      [] {
        return torch::nn::LSTM(
            torch::nn::LSTMOptions(3, 4).num_layers(2).dropout(0.3).bidirectional(true));
      },
      run)
      .with(writes_kept | draws)
      .except(Kind::MayRaise, "check_values/*", never_written, "different contents");
  add_module(
      t, "gru", {{4, 2, 3}}, [] { return torch::nn::GRU(torch::nn::GRUOptions(3, 4)); }, run)
      .with(writes_kept);
  add_module(
      t, "rnn", {{4, 2, 3}}, [] { return torch::nn::RNN(torch::nn::RNNOptions(3, 4)); }, run)
      .with(writes_kept);
  add_module(
      t, "lstm_cells", {{2, 3}}, [] { return torch::nn::LSTMCell(3, 3); },
      [](auto& m, const Tensors& a) {
        auto [h, c] = m.forward(a[0]);
        const Tensor x = at::dropout(h, 0.3, true);
        std::tie(h, c) = m.forward(x, std::tuple(h, c));
        return Tensors{h, c};
      })
      .with(writes_kept | draws);
}

void add_attention(std::vector<Function>& t) {
  const Sizes sizes{{1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 4}};
  add(t, "attention", sizes, [](const Tensors& a) {
    return at::scaled_dot_product_attention(a[0].exp(), a[1], a[2]).sin();
  });
  add(t, "attention_causal", sizes, [](const Tensors& a) {
    return at::scaled_dot_product_attention(a[0], a[1].sin(), a[2], {}, 0.0, true);
  });
  add(t, "attention_masked", sizes, [](const Tensors& a) {
    const Tensor mask = at::ones({3, 3}, at::kBool).tril();
    return at::scaled_dot_product_attention(a[0], a[1], a[2].sin(), mask);
  });
  add(t, "attention_with_dropout", sizes, [](const Tensors& a) {
    return at::scaled_dot_product_attention(a[0], a[1], a[2], {}, 0.3).sin();
  }).with(draws);
  add_module(
      t, "multihead_attention", {{3, 2, 4}},
      [] {
        return torch::nn::MultiheadAttention(
            torch::nn::MultiheadAttentionOptions(4, 2).dropout(0.2));
      },
      [](auto& m, const Tensors& a) {
        const auto [result, weights] = m.forward(a[0], a[0].sin(), a[0]);
        return Tensors{result, weights};
      })
      .with(draws | writes_kept);
}

void add_images(std::vector<Function>& t) {
  add_module(t, "conv1d", {{2, 3, 6}},
             [] { return torch::nn::Conv1d(torch::nn::Conv1dOptions(3, 4, 3).padding(1)); });
  add_module(
      t, "conv2d_grouped", {{1, 4, 5, 5}},
      [] { return torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3).groups(2).stride(2)); },
      [](auto& m, const Tensors& a) { return m.forward(a[0].exp()).relu(); });
  add_module(t, "conv3d", {{1, 2, 3, 3, 3}},
             [] { return torch::nn::Conv3d(torch::nn::Conv3dOptions(2, 2, 2)); });
  add_module(
      t, "conv_transpose2d", {{1, 2, 3, 3}},
      [] {
        return torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(2, 3, 2).stride(2));
      },
      [](auto& m, const Tensors& a) { return m.forward(a[0].exp()).tanh(); });
  add(t, "max_pool", {{1, 2, 6, 6}}, [](const Tensors& a) {
    const auto [values, indices] = at::max_pool2d_with_indices(a[0].exp(), {2, 2});
    return Tensors{values.sin(), indices, at::max_pool1d(a[0][0], {2}).exp()};
  });
  add(t, "other_pools", {{1, 2, 6, 6}}, [](const Tensors& a) {
    return at::avg_pool2d(a[0].exp(), {2, 2}).sin() + at::adaptive_avg_pool2d(a[0], {3, 3}).exp() +
           std::get<0>(at::adaptive_max_pool2d(a[0].sin(), {3, 3})) +
           F::lp_pool2d(a[0].exp(), F::LPPool2dFuncOptions(2, {2, 2}));
  });
  add(t, "fractional_max_pool", {{1, 2, 6, 6}}, [](const Tensors& a) {
    return F::fractional_max_pool2d(a[0].exp(), F::FractionalMaxPool2dFuncOptions(2).output_size(3))
        .sin();
  }).with(draws);
  add(t, "interpolate", {{1, 2, 4, 4}}, [](const Tensors& a) {
    return at::upsample_bilinear2d(a[0].exp(), {6, 6}, false).sin() +
           at::upsample_nearest2d(a[0], {6, 6}).exp() + at::upsample_bicubic2d(a[0], {6, 6}, true);
  });
  add(t, "grid_sample", {{1, 2, 4, 4}, {1, 3, 3, 2}}, [](const Tensors& a) {
    return at::grid_sampler(a[0].exp(), a[1].tanh(), 0, 0, false).sin();
  });
  add(t, "fold_and_shuffle", {{1, 4, 4, 4}}, [](const Tensors& a) {
    return at::pixel_shuffle(a[0].exp(), 2).sin().sum() *
           at::im2col(a[0], {2, 2}, {1, 1}, {0, 0}, {2, 2}).exp();
  });
}

void add_embeddings(std::vector<Function>& t) {
  add(t, "embedding", [] {
    return Made{leaves_and_whole({{6, 3}}, {2, 4}, 6), body_of([](const Tensors& a) {
                  return at::embedding(a[0], a[1], /*padding_idx=*/1).exp();
                })};
  });
  add(t, "embedding_sparse_gradient", [] {
    const auto m = torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 3).sparse(true)).ptr();
    return Made{{whole({2, 4}, 6)},
                body_of([m](const Tensors& a) { return m->forward(a[0]).sin(); }),
                m->parameters()};
  });
  add(t, "embedding_max_norm",
      [] {
        const auto m = torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 3).max_norm(0.8)).ptr();
        m->to(at::kDouble);  // in float, rounding may put a row over the norm again
        return Made{{whole({2, 4}, 6)},
                    body_of([m](const Tensors& a) { return m->forward(a[0]).sin(); }),
                    m->parameters()};
      })
      .with(is_wide)
      .except(Kind::Versions, "*",
              "the operator writes to the table, and writes the same again when it runs again");
  add(t, "embedding_bag", [] {
    return Made{leaves_and_whole({{6, 3}}, {8}, 6), body_of([](const Tensors& a) {
                  const Tensor offsets = at::tensor({0, 3, 5}, at::kLong);
                  const Tensor sums = std::get<0>(at::embedding_bag(a[0].exp(), a[1], offsets));
                  return sums * std::get<0>(at::embedding_bag(a[0], a[1], offsets, false, 2)).sin();
                })};
  });
}

void add_losses(std::vector<Function>& t) {
  add(t, "cross_entropy", [] {
    return Made{leaves_and_whole({{4, 5}}, {4}, 5), body_of([](const Tensors& a) {
                  return Tensors{at::cross_entropy_loss(a[0].exp(), a[1]),
                                 at::nll_loss(at::log_softmax(a[0], 1), a[1])};
                })};
  });
  add(t, "ctc_loss", [] {
    return Made{leaves_and_whole({{6, 2, 5}}, {2, 3}, 4), body_of([](const Tensors& a) {
                  return at::ctc_loss(at::log_softmax(a[0], 2), a[1] + 1, at::IntArrayRef{6, 6},
                                      at::IntArrayRef{3, 2});
                })};
  }).except(Kind::MayRaise, "check_values/*", never_written, "different contents");
  add(t, "losses_of_pairs", {{3, 4}, {3, 4}}, [](const Tensors& a) {
    const Tensor target = a[1].sigmoid();
    return Tensors{at::binary_cross_entropy_with_logits(a[0], target),
                   at::huber_loss(a[0], a[1]),
                   at::kl_div(at::log_softmax(a[0], 1), target),
                   at::smooth_l1_loss(a[0].exp(), a[1]),
                   at::mse_loss(a[0], target),
                   at::cosine_similarity(a[0], a[1]).exp()};
  }).with(writes_kept);
}

}  // namespace

void add_layers(std::vector<Function>& table) {
  add_linear(table);
  add_norms(table);
  add_random(table);
  add_recurrent(table);
  add_attention(table);
  add_images(table);
  add_embeddings(table);
  add_losses(table);
}

}  // namespace table
