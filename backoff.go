package provisioning

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// Defaults of a [RetryPolicy].
const (
	DefaultInitialDelay          = time.Second
	DefaultMaxDelay              = 60 * time.Second
	DefaultOperationTimeout      = 120 * time.Second
	DefaultCancelTimeout         = 30 * time.Second
	DefaultEndpointProbeInterval = 2 * time.Second
	DefaultEndpointTimeout       = 10 * time.Minute
	DefaultBootstrapTimeout      = 30 * time.Minute
	DefaultStableAfter           = 10 * time.Minute
	DefaultCancelLimit           = 5
	DefaultMaxRetryAfter         = time.Hour
)

// RetryPolicy says how long to wait for what. A zero field means its default.
// The driver copies a policy and never changes the caller's.
type RetryPolicy struct {
	// InitialDelay is the wait after the first failure in a row; each
	// further failure doubles it up to MaxDelay. Defaults 1 s and 60 s.
	InitialDelay time.Duration
	MaxDelay     time.Duration
	// Jitter is the largest fraction, in [0,1), by which a delay is made
	// shorter. It is sampled from run, attempt and failure count, so equal
	// runs wait equally. Default 0: all wait alike.
	Jitter float64
	// OperationTimeout is how long one call may take before its outcome
	// counts as unknown. Default 120 s. OperationTimeouts overrides it per
	// kind of operation; CancelBootstrap has 30 s unless named there,
	// because a polite step should not hold up the one that stops the bill.
	OperationTimeout  time.Duration
	OperationTimeouts map[OperationKind]time.Duration
	// EndpointProbeInterval is the wait between look-ups that answer "not
	// yet". Default 2 s.
	EndpointProbeInterval time.Duration
	// EndpointTimeout ends an attempt whose machine has no endpoint so long
	// after its lease was recorded; BootstrapTimeout one that is not ready
	// so long after its endpoint was known. Defaults 10 min and 30 min;
	// negative means no limit.
	EndpointTimeout  time.Duration
	BootstrapTimeout time.Duration
	// StableAfter is how long a node must have been ready for its loss to
	// count as a first failure. Default 10 min.
	StableAfter time.Duration
	// CancelLimit is how many failures in a row end the asking for an
	// orderly end of a bootstrap. Default 5; negative means never.
	CancelLimit int
	// MaxRetryAfter bounds what a [RetryAfter] error may ask for. Default
	// 1 h.
	MaxRetryAfter time.Duration
}

// ErrInvalidPolicy is what errors.Is finds in every [*PolicyError].
var ErrInvalidPolicy = errors.New("provisioning: invalid retry policy")

// PolicyError lists every fault of a refused policy.
type PolicyError struct{ Faults []string }

// Error lists all faults, separated by semicolons.
func (e *PolicyError) Error() string {
	return ErrInvalidPolicy.Error() + ": " + strings.Join(e.Faults, "; ")
}

// Unwrap returns [ErrInvalidPolicy].
func (e *PolicyError) Unwrap() error { return ErrInvalidPolicy }

// Validate returns a [*PolicyError] that lists every field out of range, or
// nil. Defaults are applied first.
func (p RetryPolicy) Validate() error {
	var faults []string
	bad := func(ok bool, format string, args ...any) {
		if !ok {
			faults = append(faults, fmt.Sprintf(format, args...))
		}
	}
	d := p.withDefaults()
	bad(d.InitialDelay > 0, "InitialDelay is %v, must be positive", d.InitialDelay)
	bad(d.MaxDelay >= d.InitialDelay, "MaxDelay is %v, must not be below InitialDelay %v", d.MaxDelay, d.InitialDelay)
	bad(d.Jitter >= 0 && d.Jitter < 1, "Jitter is %v, must be at least 0 and below 1", d.Jitter)
	bad(d.OperationTimeout > 0, "OperationTimeout is %v, must be positive", d.OperationTimeout)
	for _, kind := range slices.Sorted(maps.Keys(p.OperationTimeouts)) {
		bad(kind.valid(), "OperationTimeouts names operation %d, which does not exist", kind)
		bad(p.OperationTimeouts[kind] >= 0, "OperationTimeouts[%v] is %v, must not be negative", kind, p.OperationTimeouts[kind])
	}
	bad(d.EndpointProbeInterval > 0, "EndpointProbeInterval is %v, must be positive", d.EndpointProbeInterval)
	bad(d.StableAfter > 0, "StableAfter is %v, must be positive", d.StableAfter)
	bad(d.MaxRetryAfter > 0, "MaxRetryAfter is %v, must be positive", d.MaxRetryAfter)
	if faults != nil {
		return &PolicyError{Faults: faults}
	}
	return nil
}

// withDefaults is the one place where zero becomes a default.
func (p RetryPolicy) withDefaults() RetryPolicy {
	timeouts := maps.Clone(p.OperationTimeouts)
	if timeouts == nil {
		timeouts = make(map[OperationKind]time.Duration)
	}
	if timeouts[CancelBootstrap] == 0 {
		timeouts[CancelBootstrap] = DefaultCancelTimeout
	}
	p.OperationTimeouts = timeouts
	setDefault(&p.InitialDelay, DefaultInitialDelay)
	setDefault(&p.MaxDelay, DefaultMaxDelay)
	setDefault(&p.OperationTimeout, DefaultOperationTimeout)
	setDefault(&p.EndpointProbeInterval, DefaultEndpointProbeInterval)
	setDefault(&p.EndpointTimeout, DefaultEndpointTimeout)
	setDefault(&p.BootstrapTimeout, DefaultBootstrapTimeout)
	setDefault(&p.StableAfter, DefaultStableAfter)
	setDefault(&p.CancelLimit, DefaultCancelLimit)
	setDefault(&p.MaxRetryAfter, DefaultMaxRetryAfter)
	return p
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// timeout returns how long one call of kind may take.
func (p *RetryPolicy) timeout(kind OperationKind) time.Duration {
	if d := p.OperationTimeouts[kind]; d > 0 {
		return d
	}
	return p.OperationTimeout
}

// longestWait bounds every duration that a fold or a dispatch under this
// policy adds to now.
func (p *RetryPolicy) longestWait() time.Duration {
	longest := max(p.MaxDelay, p.OperationTimeout, p.EndpointProbeInterval, p.EndpointTimeout, p.BootstrapTimeout,
		p.StableAfter, p.MaxRetryAfter)
	for _, d := range p.OperationTimeouts {
		longest = max(longest, d)
	}
	return longest
}

// delay returns the wait after the n-th failure in a row of an attempt:
// InitialDelay·2^(n-1), at most MaxDelay, made shorter by up to Jitter. It is
// never 0 and never above MaxDelay. n = 0 counts as 1.
func (p *RetryPolicy) delay(run RunID, attempt NodeAttemptID, n uint32) time.Duration {
	n = max(n, 1)
	d := p.MaxDelay
	// Asked this way round nothing can overflow: from 63 on the right side is
	// 0, and InitialDelay is not.
	if shift := n - 1; p.InitialDelay <= p.MaxDelay>>shift {
		d = p.InitialDelay << shift
	}
	if p.Jitter == 0 {
		return d
	}
	cut := time.Duration(float64(d) * p.Jitter * sample(run, attempt, n))
	return max(d-cut, 1)
}

// sample returns a number in [0,1) that depends on its arguments alone and
// spreads well for neighbouring attempts: FNV-1a over the run, then the
// splitmix64 finalizer (Steele, Lea, Flood 2014) over attempt and count.
func sample(run RunID, attempt NodeAttemptID, n uint32) float64 {
	h := uint64(14695981039346656037)
	for i := range len(run) {
		h = (h ^ uint64(run[i])) * 1099511628211
	}
	h = mix(mix(h+uint64(attempt)) + uint64(n))
	return float64(h>>11) / (1 << 53)
}

func mix(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// countUp adds one failure to a count and stays at the largest.
func countUp(n uint32) uint32 {
	if n == math.MaxUint32 {
		return n
	}
	return n + 1
}
