# The house keeping of this repository. `make` lists what there is.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

GO       ?= go
FUZZTIME ?= 10s
FLOOR    ?= 95
# -short to see that it runs, -write to write internal/bench/RESULTS.md
BENCHFLAGS ?=

# Modules of their own: the tools, the peers that we compare with, the histories
# and the examples that need packages. What is slow to build of the peers has the tag peers, and is
# looked at by bench-peers only.
NESTED  := internal/tools internal/bench/peers internal/histories $(patsubst %/go.mod,%,$(wildcard examples/*/go.mod))
# Run from any module: the versions come from the module of the tools.
TOOL     = $(GO) tool -modfile=$(CURDIR)/internal/tools/go.mod
# The files on which the guarantees rest.
COVERED := identity.go shape.go backoff.go observation.go state.go observe.go decide.go driver.go executor.go

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## run the two examples that show what the library does
	$(GO) run ./examples/quickstart
	$(GO) run ./examples/processes

.PHONY: test
test: ## test the library
	$(GO) test ./...

.PHONY: race
race: ## test the library under the race detector (needs a C compiler)
	$(GO) test -race ./...
	cd internal/histories && $(GO) test -race ./...

# The fleets have targets of their own: one has its page tested in a real browser,
# the other one needs a real SSH server.
.PHONY: examples
examples: ## test the modules with a go.mod of their own, but for the fleets
	@for dir in $(filter-out examples/localfleet examples/sshfleet,$(NESTED)); do echo "== $$dir"; (cd "$$dir" && $(GO) vet ./... && $(GO) test ./...); done

.PHONY: fleet-test
fleet-test: ## test the fleet of real processes (needs chromium for its page)
	@command -v chromium >/dev/null || { echo "the page is tested in a browser: install Debian's package chromium"; exit 1; }
	cd examples/localfleet && $(GO) vet -tags chromium ./... && $(GO) test -tags chromium ./...

.PHONY: ssh-test
ssh-test: ## test the fleet of hosts that one has (needs OpenSSH's server)
	@test -x /usr/sbin/sshd || { echo "the hosts are OpenSSH servers: install Debian's package openssh-server"; exit 1; }
	cd examples/sshfleet && $(GO) vet ./... && $(GO) test ./...

.PHONY: lint
lint: ## gofmt, go mod tidy, go vet and staticcheck, over every module
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "not formatted:"; echo "$$unformatted"; exit 1; fi
	@for dir in . $(NESTED); do echo "== $$dir"; \
		(cd "$$dir" && $(GO) mod tidy -diff && $(GO) vet ./... && $(TOOL) staticcheck ./...); done

.PHONY: bench
bench: ## run every benchmark
	$(GO) test -run '^$$' -bench . -benchmem ./...

.PHONY: bench-scale
bench-scale: ## hold the benchmarks to what they must reach, up to a million nodes
	$(GO) run ./internal/bench $(BENCHFLAGS)

.PHONY: bench-peers
bench-peers: ## compare with the peers (builds controller-runtime: minutes)
	cd internal/bench/peers && $(GO) vet -tags peers ./... && $(GO) test -tags peers ./...
	$(GO) run ./internal/bench -peers $(BENCHFLAGS)

.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME (10s)
	@for package in $$($(GO) list ./...); do \
		for target in $$($(GO) test -list '^Fuzz' "$$package" | grep '^Fuzz' || true); do \
			echo "== $$package $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 2s "$$package"; \
		done; \
	done

.PHONY: verify
verify: ## run the full forms of all tests, print their figures (an hour; SEED=n ONLY=text)
	@$(GO) -C internal/tools run ./verify -root $(CURDIR) -seed "$(or $(SEED),0)" -only "$(ONLY)"

.PHONY: cover
cover: ## hold each of the files that matter to FLOOR (95) % of its statements
	@mkdir -p bin
	$(GO) test -coverpkg=. -coverprofile=bin/cover.out ./...
	@$(GO) -C internal/tools run ./coverfloor -floor $(FLOOR) -profile $(CURDIR)/bin/cover.out $(COVERED)

.PHONY: api
api: ## compare the exported API with that of the last tag
	@internal/tools/api.sh

.PHONY: cross
cross: ## test on 32 bits, build for other systems
	GOARCH=386 CGO_ENABLED=0 $(GO) test ./...
	GOOS=darwin GOARCH=arm64 $(GO) build . ./fakebackend
	GOOS=windows GOARCH=amd64 $(GO) build . ./fakebackend
