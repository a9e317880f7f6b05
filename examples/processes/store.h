#pragma once
// Messages by name between the processes of a program: LibTorch's TCPStore, on this machine only.

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

// Serves a store at a free port, and sets `port` to it. The store lives in this process and leaves
// nothing behind.
inline Store serve_store(uint16_t& port) {
  // A socket of the program's own, since the store's socket would accept the whole network.
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
  options.masterListenFd = socket;  // the store owns it now
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

// Returns the numbers under a name; waits until a process has set them.
inline std::vector<double> told(const Store& store, const std::string& name) {
  const std::vector<uint8_t> bytes = store->get(name);
  std::vector<double> numbers(bytes.size() / sizeof(double));
  std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}
