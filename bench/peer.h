#pragma once
// Another program of a comparison, behind two pipes: each line is a question or its answer.

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace bench {

/// The peer sleeps in a read until it is asked, so that the two programs never run at the same
/// time.
class Peer {
 public:
  explicit Peer(const std::vector<std::string>& command) {
    int to[2], from[2];
    if (pipe(to) != 0 || pipe(from) != 0) throw std::runtime_error("no pipe for the peer");
    std::signal(SIGPIPE, SIG_IGN);
    process_ = fork();
    if (process_ < 0) throw std::runtime_error("no process for the peer");
    if (process_ == 0) {
      dup2(to[0], STDIN_FILENO);
      dup2(from[1], STDOUT_FILENO);
      for (const int end : {to[0], to[1], from[0], from[1]}) close(end);
      std::vector<char*> words;
      for (const auto& word : command) words.push_back(const_cast<char*>(word.c_str()));
      words.push_back(nullptr);
      execvp(words[0], words.data());
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    questions_ = fdopen(to[1], "w");
    answers_ = fdopen(from[0], "r");
  }

  ~Peer() {
    std::fclose(questions_);  // the peer reads the end of its input and exits
    std::fclose(answers_);
    waitpid(process_, nullptr, 0);
  }

  Peer& operator=(Peer&&) = delete;

  std::string ask(const std::string& question) {
    std::fprintf(questions_, "%s\n", question.c_str());
    std::fflush(questions_);
    std::string answer;
    for (int c = std::fgetc(answers_); c != '\n'; c = std::fgetc(answers_)) {
      if (c == EOF) throw std::runtime_error("the peer ended when asked: " + question);
      answer.push_back(static_cast<char>(c));
    }
    return answer;
  }

 private:
  pid_t process_ = -1;
  std::FILE* questions_ = nullptr;
  std::FILE* answers_ = nullptr;
};

}  // namespace bench
