#pragma once
// What the processes of a program tell each other by name: LibTorch's TCPStore, on this machine
// only.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

using Store = c10::intrusive_ptr<c10d::TCPStore>;

// Serves one at a free port, which `port` becomes; it lives in this process and leaves nothing
// behind.
inline Store serve_store(uint16_t& port) {
  // A socket of our own, since the store's would listen to the whole network.
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const name = reinterpret_cast<sockaddr*>(&address);
  if (socket < 0 || bind(socket, name, size) != 0 || getsockname(socket, name, &size) != 0 ||
      listen(socket, 64) != 0)
    throw std::runtime_error(std::string("no port of this machine could be had: ") +
                             std::strerror(errno));
  port = ntohs(address.sin_port);
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = port;
  options.waitWorkers = false;
  options.masterListenFd = socket;  // it is the store's now
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

inline Store connect_store(uint16_t port) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  options.timeout = std::chrono::seconds(60);
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

inline void tell(const Store& store, const std::string& name, const std::vector<double>& numbers) {
  std::vector<uint8_t> bytes(numbers.size() * sizeof(double));
  std::memcpy(bytes.data(), numbers.data(), bytes.size());
  store->set(name, bytes);
}

// Waits until it is told.
inline std::vector<double> told(const Store& store, const std::string& name) {
  const std::vector<uint8_t> bytes = store->get(name);
  std::vector<double> numbers(bytes.size() / sizeof(double));
  std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}
