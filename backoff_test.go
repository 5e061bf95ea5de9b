package provisioning

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/big"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// delayOf is the law in unbounded arithmetic: InitialDelay·2^(n-1), capped.
func delayOf(p RetryPolicy, n uint32) time.Duration {
	// From 2^64 on every product is above every cap.
	d := new(big.Int).Lsh(big.NewInt(int64(p.InitialDelay)), uint(min(max(n, 1)-1, 64)))
	if limit := big.NewInt(int64(p.MaxDelay)); d.Cmp(limit) > 0 {
		d = limit
	}
	return time.Duration(d.Int64())
}

func TestDelayTable(t *testing.T) {
	var counts []uint32
	for n := range uint32(71) {
		counts = append(counts, n)
	}
	counts = append(counts, 1000, 1<<31-1, 1<<31, 1<<31+1, math.MaxUint32-1, math.MaxUint32)

	p := RetryPolicy{Jitter: 0.5}.withDefaults()
	require.Equal(t, p.delay("r", 1, 1), p.delay("r", 1, 0), "no failure counts as one")
	p.Jitter = 0
	seconds := []time.Duration{1, 1, 2, 4, 8, 16, 32} // of n = 0…6; then the cap
	for _, n := range counts {
		want := 60 * time.Second
		if n < uint32(len(seconds)) {
			want = seconds[n] * time.Second
		}
		require.Equal(t, want, p.delay("r", 1, n), "n = %d", n)
	}

	for _, p := range []RetryPolicy{
		{InitialDelay: 1, MaxDelay: math.MaxInt64},
		{InitialDelay: 1, MaxDelay: math.MaxInt64 - 1},
		{InitialDelay: 1, MaxDelay: 1},
		{InitialDelay: 3, MaxDelay: 1 << 62},
		{InitialDelay: math.MaxInt64, MaxDelay: math.MaxInt64},
		{InitialDelay: math.MaxInt64 / 2, MaxDelay: math.MaxInt64},
		{InitialDelay: time.Second, MaxDelay: 64 * time.Second}, // a cap that is met exactly
		{InitialDelay: time.Second, MaxDelay: 64*time.Second - 1},
		{InitialDelay: 7 * time.Second, MaxDelay: time.Hour},
	} {
		require.NoError(t, p.Validate())
		for _, n := range counts {
			require.Equal(t, delayOf(p, n), p.delay("r", 1, n), "n = %d of %+v", n, p)
		}
	}
}

func TestDelayExtremes(t *testing.T) {
	p := RetryPolicy{InitialDelay: 1, MaxDelay: math.MaxInt64}
	require.Equal(t, time.Duration(1), p.delay("r", 1, 1))
	require.Equal(t, time.Duration(1)<<62, p.delay("r", 1, 63))
	require.Equal(t, time.Duration(math.MaxInt64), p.delay("r", 1, 64))
	require.Equal(t, time.Duration(math.MaxInt64), p.delay("r", 1, math.MaxUint32))

	p.Jitter = math.Nextafter(1, 0) // the largest lawful one
	for n := range uint32(70) {
		for attempt := range NodeAttemptID(50) {
			d := p.delay("r", attempt, n)
			require.Positive(t, d)
			require.LessOrEqual(t, d, delayOf(p, n))
		}
	}
}

func TestCountUpStaysAtTheLargest(t *testing.T) {
	require.Equal(t, uint32(1), countUp(0))
	require.Equal(t, uint32(math.MaxUint32), countUp(math.MaxUint32-1))
	require.Equal(t, uint32(math.MaxUint32), countUp(math.MaxUint32))
}

// A provider goes down and 1000 slots fail at once. With jitter they do not
// come back at once.
func TestHerdSpreads(t *testing.T) {
	p := RetryPolicy{Jitter: 0.5}.withDefaults()
	herd := func(run RunID, n uint32) []time.Duration {
		var waits []time.Duration
		for attempt := range NodeAttemptID(1000) {
			waits = append(waits, p.delay(run, attempt+1, n))
		}
		return waits
	}
	for _, run := range []RunID{"r", "s", "", "a-much-longer-name-of-a-run"} {
		for n := range uint32(7) {
			full := delayOf(p, n)
			waits := herd(run, n)
			require.Equal(t, waits, herd(run, n), "two equal runs wait equally")
			var tenth [10]int
			for _, wait := range waits {
				require.Greater(t, wait, full/2)
				require.LessOrEqual(t, wait, full)
				tenth[min(int(10*(full-wait)/(full/2)), 9)]++
			}
			for i, count := range tenth {
				// 100 are expected, 9.5 is the standard deviation.
				require.InDelta(t, 100, count, 45, "run %q, n = %d: tenth %d of the span", run, n, i)
			}
			slices.Sort(waits)
			require.Greater(t, len(slices.Compact(waits)), 990)
		}
	}
	require.NotEqual(t, herd("r", 1), herd("s", 1), "runs do not follow each other")

	// Who waited longest after one failure is not who waits longest after the
	// next: the product moment of neighbouring counts is near 0.
	first, second := herd("r", 1), herd("r", 2)
	sum := 0.0
	for i := range first {
		sum += (first[i].Seconds() - 0.75) * (second[i].Seconds() - 1.5)
	}
	require.Less(t, math.Abs(sum/1000), 0.1*0.1443*0.2887, "correlation of two counts of the same attempts")
}

// Equal inputs give equal waits on every machine and in every build.
func TestJitterIsFixed(t *testing.T) {
	p := RetryPolicy{InitialDelay: time.Second, MaxDelay: time.Hour, Jitter: 0.5}
	for _, c := range []struct {
		run     RunID
		attempt NodeAttemptID
		n       uint32
		want    time.Duration
	}{
		{"r", 1, 1, 779974595}, {"r", 2, 1, 964088870}, {"r", 1, 2, 1582150179},
		{"", 0, 0, 684987748}, {"run", math.MaxUint64, math.MaxUint32, 3060017882615},
	} {
		require.Equal(t, c.want, p.delay(c.run, c.attempt, c.n), "%+v", c)
	}
}

func TestPolicyDefaults(t *testing.T) {
	d := RetryPolicy{}.withDefaults()
	require.Equal(t, RetryPolicy{
		InitialDelay: time.Second, MaxDelay: time.Minute, OperationTimeout: 2 * time.Minute,
		OperationTimeouts:     map[OperationKind]time.Duration{CancelBootstrap: 30 * time.Second},
		EndpointProbeInterval: 2 * time.Second, EndpointTimeout: 10 * time.Minute, BootstrapTimeout: 30 * time.Minute,
		StableAfter: 10 * time.Minute, CancelLimit: 5, MaxRetryAfter: time.Hour,
	}, d)
	require.NoError(t, RetryPolicy{}.Validate())
	require.Equal(t, d, d.withDefaults(), "defaults are applied once")

	own := RetryPolicy{InitialDelay: 1, MaxDelay: 2, Jitter: 0.25, OperationTimeout: 3, EndpointProbeInterval: 4, EndpointTimeout: -1,
		BootstrapTimeout: -2, StableAfter: 5, CancelLimit: -3, MaxRetryAfter: 6,
		OperationTimeouts: map[OperationKind]time.Duration{CreateLease: 7, CancelBootstrap: 8}}
	require.NoError(t, own.Validate())
	require.Equal(t, own, own.withDefaults(), "what is said stands")
}

func TestPolicyOfTheCallerIsLeftAlone(t *testing.T) {
	timeouts := map[OperationKind]time.Duration{CreateLease: time.Minute}
	p := RetryPolicy{OperationTimeouts: timeouts}
	d := p.withDefaults()
	require.NoError(t, p.Validate())
	require.Equal(t, map[OperationKind]time.Duration{CreateLease: time.Minute}, timeouts)
	require.Zero(t, p.InitialDelay)
	timeouts[CreateLease] = time.Hour
	require.Equal(t, time.Minute, d.timeout(CreateLease))
}

func TestOperationTimeouts(t *testing.T) {
	p := RetryPolicy{OperationTimeout: 10 * time.Second, OperationTimeouts: map[OperationKind]time.Duration{CreateLease: time.Hour, DestroyLease: 0}}.withDefaults()
	for kind, want := range map[OperationKind]time.Duration{
		CreateLease: time.Hour, LookupEndpoint: 10 * time.Second, StartBootstrap: 10 * time.Second,
		BootstrapConvergenceObserved: 10 * time.Second, CancelBootstrap: DefaultCancelTimeout, DestroyLease: 10 * time.Second,
	} {
		require.Equal(t, want, p.timeout(kind), kind)
	}
	require.NoError(t, p.Validate(), "0 is the default, and no fault")
}

func TestPolicyFaults(t *testing.T) {
	for _, c := range []struct {
		policy RetryPolicy
		fault  string
	}{
		{RetryPolicy{InitialDelay: -1}, "InitialDelay is -1ns, must be positive"},
		{RetryPolicy{MaxDelay: 1}, "MaxDelay is 1ns, must not be below InitialDelay 1s"},
		{RetryPolicy{MaxDelay: -1}, "MaxDelay is -1ns, must not be below InitialDelay 1s"},
		{RetryPolicy{InitialDelay: 2 * time.Minute}, "MaxDelay is 1m0s, must not be below InitialDelay 2m0s"},
		{RetryPolicy{Jitter: 1}, "Jitter is 1, must be at least 0 and below 1"},
		{RetryPolicy{Jitter: -0.1}, "Jitter is -0.1, must be at least 0 and below 1"},
		{RetryPolicy{Jitter: math.NaN()}, "Jitter is NaN, must be at least 0 and below 1"},
		{RetryPolicy{Jitter: math.Inf(1)}, "Jitter is +Inf, must be at least 0 and below 1"},
		{RetryPolicy{OperationTimeout: -1}, "OperationTimeout is -1ns, must be positive"},
		{RetryPolicy{OperationTimeouts: map[OperationKind]time.Duration{CreateLease: -1}}, "OperationTimeouts[CreateLease] is -1ns, must not be negative"},
		{RetryPolicy{OperationTimeouts: map[OperationKind]time.Duration{CancelBootstrap: -1}}, "OperationTimeouts[CancelBootstrap] is -1ns, must not be negative"},
		{RetryPolicy{OperationTimeouts: map[OperationKind]time.Duration{NoOperation: 1}}, "OperationTimeouts names operation 0, which does not exist"},
		{RetryPolicy{OperationTimeouts: map[OperationKind]time.Duration{operationKinds: 1}}, "OperationTimeouts names operation 7, which does not exist"},
		{RetryPolicy{EndpointProbeInterval: -1}, "EndpointProbeInterval is -1ns, must be positive"},
		{RetryPolicy{StableAfter: -1}, "StableAfter is -1ns, must be positive"},
		{RetryPolicy{MaxRetryAfter: -1}, "MaxRetryAfter is -1ns, must be positive"},
	} {
		err := c.policy.Validate()
		require.EqualError(t, err, "provisioning: invalid retry policy: "+c.fault)
		require.ErrorIs(t, err, ErrInvalidPolicy)
		refusal, ok := errors.AsType[*PolicyError](err)
		require.True(t, ok)
		require.Equal(t, []string{c.fault}, refusal.Faults)
	}
}

func TestEveryPolicyFaultIsListed(t *testing.T) {
	err := RetryPolicy{InitialDelay: -2, MaxDelay: -3, Jitter: 2, OperationTimeout: -4,
		OperationTimeouts:     map[OperationKind]time.Duration{99: -5, DestroyLease: -6, CreateLease: -7, 8: 1},
		EndpointProbeInterval: -8, StableAfter: -9, MaxRetryAfter: -10}.Validate()
	refusal, ok := errors.AsType[*PolicyError](err)
	require.True(t, ok)
	require.Equal(t, []string{
		"InitialDelay is -2ns, must be positive",
		"MaxDelay is -3ns, must not be below InitialDelay -2ns",
		"Jitter is 2, must be at least 0 and below 1",
		"OperationTimeout is -4ns, must be positive",
		"OperationTimeouts[CreateLease] is -7ns, must not be negative",
		"OperationTimeouts[DestroyLease] is -6ns, must not be negative",
		"OperationTimeouts names operation 8, which does not exist",
		"OperationTimeouts names operation 99, which does not exist",
		"OperationTimeouts[unknown(99)] is -5ns, must not be negative",
		"EndpointProbeInterval is -8ns, must be positive",
		"StableAfter is -9ns, must be positive",
		"MaxRetryAfter is -10ns, must be positive",
	}, refusal.Faults)
}

// longestWait must bound whatever a fold may add to now, or a deadline can
// overflow where the clock was said to be fine.
func TestLongestWaitKnowsEveryDuration(t *testing.T) {
	require.Equal(t, time.Hour, new(RetryPolicy{}.withDefaults()).longestWait())
	const long = 1000 * time.Hour
	for name, p := range map[string]RetryPolicy{
		"MaxDelay": {MaxDelay: long}, "OperationTimeout": {OperationTimeout: long}, "EndpointProbeInterval": {EndpointProbeInterval: long},
		"EndpointTimeout": {EndpointTimeout: long}, "BootstrapTimeout": {BootstrapTimeout: long}, "StableAfter": {StableAfter: long},
		"MaxRetryAfter": {MaxRetryAfter: long}, "OperationTimeouts": {OperationTimeouts: map[OperationKind]time.Duration{DestroyLease: long}},
	} {
		p := p.withDefaults()
		require.Equal(t, long, p.longestWait(), name)
	}
	endless := RetryPolicy{EndpointTimeout: -1, BootstrapTimeout: math.MinInt64}.withDefaults()
	require.Equal(t, time.Hour, endless.longestWait(), "no limit is no long wait")
}

// drawPolicy draws policies as people write them, most of them lawful.
func drawPolicy(t *rapid.T) RetryPolicy {
	duration := func(label string) time.Duration {
		return time.Duration(rapid.OneOf(rapid.Just[int64](0), rapid.Int64Range(1, 1e12), rapid.Int64Min(1), rapid.Int64Range(-3, 0)).Draw(t, label))
	}
	p := RetryPolicy{
		InitialDelay: duration("InitialDelay"), MaxDelay: duration("MaxDelay"),
		Jitter:           rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(0, 1)).Draw(t, "Jitter"),
		OperationTimeout: duration("OperationTimeout"), EndpointProbeInterval: duration("EndpointProbeInterval"),
		EndpointTimeout: duration("EndpointTimeout"), BootstrapTimeout: duration("BootstrapTimeout"),
		StableAfter: duration("StableAfter"), CancelLimit: rapid.IntRange(-2, 9).Draw(t, "CancelLimit"), MaxRetryAfter: duration("MaxRetryAfter"),
	}
	for kind := range operationKinds + 1 {
		if rapid.Bool().Draw(t, "named") {
			if p.OperationTimeouts == nil {
				p.OperationTimeouts = make(map[OperationKind]time.Duration)
			}
			p.OperationTimeouts[kind] = duration("timeout")
		}
	}
	return p
}

func TestProp_AnAcceptedPolicyWaitsForEverything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		before := maps.Clone(p.OperationTimeouts)
		err := p.Validate()
		require.Equal(t, before, p.OperationTimeouts)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidPolicy)
			return
		}
		d := p.withDefaults()
		longest := d.longestWait()
		for kind := CreateLease; kind < operationKinds; kind++ {
			require.Positive(t, d.timeout(kind))
			require.LessOrEqual(t, d.timeout(kind), longest)
		}
		for _, wait := range []time.Duration{d.InitialDelay, d.MaxDelay, d.EndpointProbeInterval, d.StableAfter, d.MaxRetryAfter} {
			require.Positive(t, wait)
			require.LessOrEqual(t, wait, longest)
		}
		require.NotZero(t, d.EndpointTimeout)
		require.NotZero(t, d.BootstrapTimeout)
		require.NotZero(t, d.CancelLimit)
	})
}

func TestProp_DelayWithinBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		initial := rapid.OneOf(rapid.Int64Range(1, 1e10), rapid.Int64Min(1)).Draw(t, "initial")
		p := RetryPolicy{InitialDelay: time.Duration(initial), MaxDelay: time.Duration(rapid.Int64Min(initial).Draw(t, "max"))}
		run := RunID(rapid.String().Draw(t, "run"))
		attempt := NodeAttemptID(rapid.Uint64().Draw(t, "attempt"))
		n := rapid.OneOf(rapid.Uint32Range(0, 70), rapid.Uint32()).Draw(t, "n")

		full := p.delay(run, attempt, n)
		require.Equal(t, delayOf(p, n), full)
		require.LessOrEqual(t, full, p.delay(run, attempt, countUp(n)), "a wait never shrinks")

		p.Jitter = rapid.Float64Range(0, math.Nextafter(1, 0)).Draw(t, "jitter")
		require.NoError(t, p.Validate())
		wait := p.delay(run, attempt, n)
		require.Positive(t, wait)
		require.LessOrEqual(t, wait, full)
		// float64 holds 53 bits of the cut.
		require.GreaterOrEqual(t, float64(wait), float64(full)*(1-p.Jitter)*(1-1e-12)-1)
		require.Equal(t, wait, p.delay(run, attempt, n))
	})
}

func TestProp_SampleIsAFraction(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := sample(RunID(rapid.String().Draw(t, "run")), NodeAttemptID(rapid.Uint64().Draw(t, "attempt")), rapid.Uint32().Draw(t, "n"))
		require.GreaterOrEqual(t, s, 0.0)
		require.Less(t, s, 1.0)
	})
}

// A policy is judged as a whole, with every fault at once.
func ExampleRetryPolicy() {
	p := RetryPolicy{InitialDelay: time.Second, MaxDelay: 10 * time.Second}
	fmt.Println(p.Validate())
	p.MaxDelay = time.Millisecond
	fmt.Println(p.Validate())
	// Output:
	// <nil>
	// provisioning: invalid retry policy: MaxDelay is 1ms, must not be below InitialDelay 1s
}
