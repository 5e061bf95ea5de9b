package fakebackend

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

const (
	create   = provisioning.CreateLease
	lookup   = provisioning.LookupEndpoint
	start    = provisioning.StartBootstrap
	converge = provisioning.BootstrapConvergenceObserved
	cancel   = provisioning.CancelBootstrap
	destroy  = provisioning.DestroyLease
)

func keyOf(node provisioning.LogicalNodeID, attempt provisioning.NodeAttemptID) provisioning.ExternalKey {
	return provisioning.ExternalKey{Run: "run", Node: node, Attempt: attempt}
}

var key = keyOf("w-0", 1)

// caller makes the calls of one attempt, with the facts that a driver would
// have.
type caller struct {
	b       *Backend
	key     provisioning.ExternalKey
	lease   provisioning.ProviderLeaseID
	session provisioning.BootstrapSessionID
	seen    *[]provisioning.Observation
}

func newCaller(b *Backend, key provisioning.ExternalKey) *caller {
	return &caller{b: b, key: key, lease: leaseID(key, 1), session: sessionID(key, 1), seen: new([]provisioning.Observation)}
}

func (c *caller) sink() provisioning.BootstrapSink {
	return provisioning.NewBootstrapSink(c.key.Node, c.key.Attempt, func(o provisioning.Observation) { *c.seen = append(*c.seen, o) })
}

func (c *caller) create() (provisioning.CreateLeaseResult, error) {
	return c.b.CreateLease(context.Background(), provisioning.CreateLeaseRequest{Key: c.key})
}

func (c *caller) adopt() (provisioning.CreateLeaseResult, error) {
	return c.b.CreateLease(context.Background(), provisioning.CreateLeaseRequest{Key: c.key, AdoptOnly: true})
}

func (c *caller) lookup() (*provisioning.SSHEndpoint, error) {
	result, err := c.b.LookupEndpoint(context.Background(), provisioning.LookupEndpointRequest{Key: c.key, Lease: c.lease})
	return result.Endpoint, err
}

func (c *caller) start() (provisioning.BootstrapSessionID, error) {
	result, err := c.b.StartBootstrap(context.Background(), provisioning.StartBootstrapRequest{
		Key: c.key, Lease: c.lease, Endpoint: endpointOf(c.key.Node), Sink: c.sink()})
	return result.Session, err
}

func (c *caller) converge() error {
	return c.b.BootstrapConvergenceObserved(context.Background(), provisioning.BootstrapConvergenceObservedRequest{
		Key: c.key, Lease: c.lease, Session: c.session})
}

func (c *caller) cancel() error {
	return c.b.CancelBootstrap(context.Background(), provisioning.CancelBootstrapRequest{Key: c.key, Lease: c.lease, Session: c.session})
}

func (c *caller) destroy() error {
	return c.b.DestroyLease(context.Background(), provisioning.DestroyLeaseRequest{Key: c.key, Lease: c.lease})
}

// call makes any of the calls, an AdoptOnly one never.
func (c *caller) call(kind provisioning.OperationKind) error {
	var err error
	switch kind {
	case create:
		_, err = c.create()
	case lookup:
		_, err = c.lookup()
	case start:
		_, err = c.start()
	case converge:
		err = c.converge()
	case cancel:
		err = c.cancel()
	case destroy:
		err = c.destroy()
	}
	return err
}

// upTo brings the attempt to where a call of kind makes sense.
func (c *caller) upTo(t *testing.T, kind provisioning.OperationKind) {
	t.Helper()
	if kind > create {
		require.NoError(t, c.call(create))
	}
	if kind > start {
		require.NoError(t, c.call(start))
	}
}

func class(kind provisioning.OperationKind, err error) string {
	return provisioning.Classify(kind, err).String()
}

func after(b *Backend, d time.Duration) { b.AdvanceTo(b.Now().Add(d)) }

func TestHappyPath(t *testing.T) {
	b := New(Config{})
	c := newCaller(b, key)
	made, err := c.create()
	require.NoError(t, err)
	require.Equal(t, provisioning.ProviderLeaseID("lease/run/w-0/1"), made.Lease)
	require.Equal(t, &provisioning.SSHEndpoint{Host: "w-0.test", Port: 22}, made.Endpoint)
	at, err := c.lookup()
	require.NoError(t, err)
	require.Equal(t, made.Endpoint, at)
	session, err := c.start()
	require.NoError(t, err)
	require.Equal(t, b.SessionID(key), session)
	require.Equal(t, []provisioning.Observation{{Kind: provisioning.SwactorJoined, Node: "w-0", Attempt: 1, Session: session, Swactor: SwactorID(key)}}, *c.seen)
	require.NoError(t, c.converge())
	require.NoError(t, c.converge(), "it may be repeated")
	require.Equal(t, []Machine{{Key: key, Lease: made.Lease, Endpoint: *made.Endpoint, CreatedAt: b.Now()}}, b.Machines())
	require.NoError(t, c.destroy())
	require.False(t, b.SessionLive(key), "B6: a destroy ends the session")
	require.Empty(t, b.Machines())
	require.Equal(t, []int{1, 1, 0, 0}, []int{b.Created("w-0"), b.Destroyed("w-0"), b.Live("w-0"), b.LiveTotal()})
	for kind, n := range map[provisioning.OperationKind]int{create: 1, lookup: 1, start: 1, converge: 2, cancel: 0, destroy: 1} {
		require.Equal(t, n, b.Calls("w-0", kind), kind)
	}
}

// Every outcome on every operation that it fits: how the answer is read, and
// whether the effect has happened once everything is over.
func TestOutcomes(t *testing.T) {
	// What each operation changes.
	happened := map[provisioning.OperationKind]func(b *Backend) bool{
		create:  func(b *Backend) bool { return b.Live("w-0") == 1 },
		start:   func(b *Backend) bool { return b.SessionLive(key) },
		cancel:  func(b *Backend) bool { return !b.SessionLive(key) },
		destroy: func(b *Backend) bool { return b.Live("w-0") == 0 && b.Destroyed("w-0") == 1 },
	}
	const (
		panicked = "panic"
		none     = "none"
	)
	tests := []struct {
		outcome   string
		class     string // "unclassified": as provisioning.Classify reads it
		effect    bool
		afterward bool // an effect that comes 30 s later
	}{
		{outcome: "ok", class: none, effect: true},
		{outcome: "definite", class: "Definite"},
		{outcome: "capacity", class: "Definite"},
		{outcome: "retry-after=30s", class: "Definite"},
		{outcome: "error", class: "unclassified"},
		{outcome: "done-error", class: "unclassified", effect: true},
		{outcome: "ambiguous", class: "Ambiguous"},
		{outcome: "done-ambiguous", class: "Ambiguous", effect: true},
		{outcome: "late=30s", class: "Ambiguous", afterward: true},
		{outcome: "panic", class: panicked},
		{outcome: "done-panic", class: panicked, effect: true},
		{outcome: "refuse", class: "NotStarted"},
		{outcome: "spot-loss=1h", class: none, effect: true},
	}
	for _, kind := range []provisioning.OperationKind{create, lookup, start, converge, cancel, destroy} {
		for _, test := range tests {
			t.Run(fmt.Sprintf("%v/%s", kind, test.outcome), func(t *testing.T) {
				outcomes, err := ParseOutcome(test.outcome)
				require.NoError(t, err)
				b := New(Config{ManualBootstrap: true})
				c := newCaller(b, key)
				c.upTo(t, kind)
				b.Script("w-0", kind, outcomes...)
				if test.class == panicked {
					require.Panics(t, func() { c.call(kind) })
				} else {
					want := test.class
					if want == "unclassified" {
						want = class(kind, errors.New("any"))
					}
					require.Equal(t, want, class(kind, c.call(kind)))
				}
				if test.outcome == "refuse" {
					require.Zero(t, b.Calls("w-0", kind), "a refusal is no call")
				} else {
					require.Equal(t, 1, b.Calls("w-0", kind))
				}
				if check := happened[kind]; check != nil {
					require.Equal(t, test.effect, check(b), "effect at once")
					after(b, 30*time.Second)
					require.Equal(t, test.effect || test.afterward, check(b), "effect in the end")
				}
			})
		}
	}
}

func TestOutcomesOfCreateAndLookupAlone(t *testing.T) {
	b := New(Config{})
	c := newCaller(b, key)
	b.Script("w-0", create, OKNoEndpoint())
	made, err := c.create()
	require.NoError(t, err)
	require.Equal(t, provisioning.CreateLeaseResult{Lease: c.lease}, made)
	b.Script("w-0", lookup, NotReady())
	at, err := c.lookup()
	require.NoError(t, err)
	require.Nil(t, at)
	at, err = c.lookup()
	require.NoError(t, err)
	require.NotNil(t, at)
}

func TestLostTakesTheMachineAndItsLateEffects(t *testing.T) {
	for _, kind := range []provisioning.OperationKind{create, lookup, start, converge, cancel, destroy} {
		b := New(Config{ManualBootstrap: true, Class: Label})
		c := newCaller(b, key)
		b.Script("w-0", create, Late(time.Minute))
		require.Error(t, c.call(create))
		c.upTo(t, kind)
		b.Script("w-0", kind, Lost())
		require.ErrorIs(t, c.call(kind), provisioning.ErrLeaseLost, kind)
		require.Zero(t, b.Live("w-0"), kind)
		require.False(t, b.SessionLive(key), kind)
		after(b, time.Hour)
		require.Zero(t, b.Live("w-0"), "%v: void", kind)
	}
}

// B11: the dead machine is billed until it is destroyed, and is of no use.
func TestDeadMachine(t *testing.T) {
	b := New(Config{})
	c := newCaller(b, key)
	b.Script("w-0", create, Dead())
	_, err := c.create()
	require.ErrorIs(t, err, provisioning.ErrLeaseLost)
	require.Equal(t, 1, b.Live("w-0"))
	require.True(t, b.Machines()[0].Dead)
	_, err = c.create()
	require.ErrorIs(t, err, provisioning.ErrLeaseLost, "it stays dead")
	_, err = c.lookup()
	require.ErrorIs(t, err, provisioning.ErrLeaseLost)
	_, err = c.start()
	require.ErrorIs(t, err, provisioning.ErrLeaseLost)
	require.Equal(t, 1, b.Created("w-0"))
	require.NoError(t, c.destroy())
	require.Zero(t, b.Live("w-0"))

	b = New(Config{})
	c = newCaller(b, key)
	b.Script("w-0", create, Dead())
	_, err = c.adopt()
	require.ErrorIs(t, err, provisioning.ErrNothingToAdopt, "nothing to find, nothing to make")
	require.Zero(t, b.Created("w-0"))
}

func TestVanishAndSpotLoss(t *testing.T) {
	b := New(Config{})
	c := newCaller(b, key)
	b.Script("w-0", create, Vanish(10*time.Second))
	require.NoError(t, c.call(create))
	require.NoError(t, c.call(start))
	*c.seen = nil
	after(b, 10*time.Second-1)
	require.Equal(t, 1, b.Live("w-0"))
	after(b, 1)
	require.Zero(t, b.Live("w-0"))
	require.Empty(t, *c.seen, "without a word")
	require.Equal(t, "Definite", class(converge, c.converge()))

	second := newCaller(b, keyOf("w-0", 2))
	b.Script("w-0", create, SpotLoss(10*time.Second))
	require.NoError(t, second.call(create))
	require.NoError(t, second.call(start))
	*second.seen = nil
	after(b, time.Hour)
	require.Zero(t, b.Live("w-0"))
	require.Len(t, *second.seen, 1)
	require.Equal(t, provisioning.NodeLost, (*second.seen)[0].Kind)
	require.Equal(t, provisioning.NodeAttemptID(2), (*second.seen)[0].Attempt)
	require.Zero(t, b.Destroyed("w-0"))

	third := newCaller(b, keyOf("w-0", 3))
	b.Script("w-0", create, SpotLoss(10*time.Second))
	require.NoError(t, third.call(create))
	require.NoError(t, third.destroy())
	again := newCaller(b, keyOf("w-0", 4))
	require.NoError(t, again.call(create))
	after(b, time.Hour)
	require.Equal(t, 1, b.Live("w-0"), "another machine is not taken")
}

// B1: what exists for the key is found, by create and by start.
func TestBackend_B1(t *testing.T) {
	for _, provider := range []Class{Token, Name, Label} {
		b := New(Config{Class: provider})
		c := newCaller(b, key)
		b.Script("w-0", create, DoneAmbiguous(), Definite(), RetryAfter(time.Second), Capacity())
		b.Script("w-0", start, DoneAmbiguous())
		require.Error(t, c.call(create))
		for range 4 {
			made, err := c.create()
			require.NoError(t, err, "a create adopts before it is refused")
			require.Equal(t, c.lease, made.Lease)
		}
		require.Equal(t, 1, b.Created("w-0"), provider)
		require.Error(t, c.call(start))
		session, err := c.start()
		require.NoError(t, err)
		require.Equal(t, c.session, session)
		require.Len(t, *c.seen, 1, "the join is reported once")
	}
}

// What becomes of a create that lands late, by class.
func TestLateCreate(t *testing.T) {
	tests := []struct {
		name             string
		class            Class
		between          func(c *caller) error // 10 s after the late create
		answer           string
		live, createdEnd int
	}{
		{"token, nothing between", Token, nil, "", 1, 1},
		{"token, a create voids it", Token, func(c *caller) error { return c.call(create) }, "none", 1, 1},
		{"token, adopt-only voids it", Token, func(c *caller) error { _, err := c.adopt(); return err }, "Definite", 0, 0},
		{"token, a refusal voids it", Token, scripted(create, Definite()), "Definite", 0, 0},
		{"token, an unclear answer voids it", Token, scripted(create, Ambiguous()), "Ambiguous", 0, 0},
		{"token, a second late one takes its place", Token, scripted(create, Late(time.Hour)), "Ambiguous", 0, 0},
		{"name, nothing between", Name, nil, "", 1, 1},
		{"name, a create voids it", Name, func(c *caller) error { return c.call(create) }, "none", 1, 1},
		{"name, adopt-only must wait", Name, func(c *caller) error { _, err := c.adopt(); return err }, "Ambiguous", 1, 1},
		{"name, a refusal is not final", Name, scripted(create, Definite()), "Ambiguous", 1, 1},
		{"name, two late ones make one machine", Name, scripted(create, Late(20*time.Second)), "Ambiguous", 1, 1},
		{"label, nothing between", Label, nil, "", 1, 1},
		{"label, a create makes a second", Label, func(c *caller) error { return c.call(create) }, "none", 2, 2},
		{"label, adopt-only must wait", Label, func(c *caller) error { _, err := c.adopt(); return err }, "Ambiguous", 1, 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			b := New(Config{Class: test.class})
			c := newCaller(b, key)
			b.Script("w-0", create, Late(time.Minute))
			require.Equal(t, "Ambiguous", class(create, c.call(create)))
			after(b, 10*time.Second)
			if test.between != nil {
				require.Equal(t, test.answer, class(create, test.between(c)))
			}
			after(b, 50*time.Second-1)
			require.Zero(t, b.Created("w-0")-b.Live("w-0"))
			after(b, 1)
			require.Equal(t, test.live, b.Live("w-0"))
			require.Equal(t, test.createdEnd, b.Created("w-0"))
		})
	}
}

func scripted(kind provisioning.OperationKind, o Outcome) func(c *caller) error {
	return func(c *caller) error {
		c.b.Script(c.key.Node, kind, o)
		return c.call(kind)
	}
}

// B8: of several machines of a key the one with the lowest id is kept.
func TestBackend_B8(t *testing.T) {
	b := New(Config{Class: Label})
	c := newCaller(b, key)
	b.Script("w-0", create, Late(time.Minute))
	require.Error(t, c.call(create))
	require.NoError(t, c.call(create))
	after(b, time.Minute)
	require.Equal(t, 2, b.Live("w-0"))
	made, err := c.adopt()
	require.NoError(t, err)
	require.Equal(t, leaseID(key, 1), made.Lease)
	require.Equal(t, []int{1, 2, 1}, []int{b.Live("w-0"), b.Created("w-0"), b.Destroyed("w-0")})

	// Another attempt, another run, another slot: nothing is theirs.
	for _, other := range []provisioning.ExternalKey{keyOf("w-0", 2), keyOf("w-1", 1), {Run: "other", Node: "w-0", Attempt: 1}} {
		_, err := newCaller(b, other).adopt()
		require.ErrorIs(t, err, provisioning.ErrNothingToAdopt)
		thief := newCaller(b, other)
		thief.lease, thief.session = c.lease, c.session
		require.NoError(t, c.call(start))
		for _, kind := range []provisioning.OperationKind{lookup, start, converge, cancel, destroy} {
			require.Equal(t, "Definite", class(kind, thief.call(kind)), kind)
		}
		require.Equal(t, 1, b.LiveKey(key))
		require.True(t, b.SessionLive(key))
	}
}

// B3: inside the settle time there is no final answer.
func TestBackend_B3(t *testing.T) {
	const settle = 10 * time.Second
	for _, provider := range []Class{Token, Name, Label} {
		t.Run(provider.String(), func(t *testing.T) {
			fresh := func(first Outcome) (*Backend, *caller) {
				b := New(Config{Class: provider, Settle: settle})
				b.Script("w-0", create, first)
				c := newCaller(b, key)
				_ = c.call(create)
				return b, c
			}
			t.Run("nothing there", func(t *testing.T) {
				b, c := fresh(Ambiguous())
				after(b, settle-1)
				_, err := c.adopt()
				require.Equal(t, "Ambiguous", class(create, err))
				after(b, 1)
				_, err = c.adopt()
				require.ErrorIs(t, err, provisioning.ErrNothingToAdopt, "the settle time counts from the create, not from the asking")
			})
			t.Run("definite and lost", func(t *testing.T) {
				for _, o := range []Outcome{Definite(), Capacity(), RetryAfter(time.Second), Lost()} {
					b, c := fresh(Ambiguous())
					after(b, settle-1)
					require.Equal(t, "Ambiguous", class(create, scripted(create, o)(c)), o)
					after(b, 1)
					require.NotEqual(t, "Ambiguous", class(create, scripted(create, o)(c)), o)
				}
			})
			t.Run("a first no is final", func(t *testing.T) {
				_, c := fresh(Definite())
				require.Equal(t, "Definite", class(create, scripted(create, Definite())(c)), "a refused create cannot have bought")
				_, err := c.adopt()
				require.ErrorIs(t, err, provisioning.ErrNothingToAdopt)
			})
			t.Run("destroy", func(t *testing.T) {
				b, c := fresh(OK())
				require.Equal(t, "Ambiguous", class(destroy, c.destroy()))
				require.Zero(t, b.Live("w-0"), "what is there goes all the same")
				after(b, settle-1)
				require.Equal(t, "Ambiguous", class(destroy, c.destroy()))
				require.Equal(t, "Ambiguous", class(destroy, scripted(destroy, Lost())(c)))
				after(b, 1)
				require.NoError(t, c.destroy())
			})
			t.Run("a second create", func(t *testing.T) {
				b, c := fresh(Ambiguous())
				after(b, settle-1)
				err := c.call(create)
				if provider == Label {
					require.Equal(t, "Ambiguous", class(create, err))
					require.Zero(t, b.Created("w-0"), "a create by label makes nothing")
					after(b, 1)
					require.NoError(t, c.call(create), "and does not begin the settle time anew")
				} else {
					require.NoError(t, err)
				}
				require.Equal(t, 1, b.Created("w-0"))
			})
		})
	}
}

// A new machine is missed by a look by label for Lag, and Settle is at least
// that.
func TestLag(t *testing.T) {
	b := New(Config{Class: Label, Lag: 5 * time.Second, Settle: time.Second})
	c := newCaller(b, key)
	b.Script("w-0", create, DoneAmbiguous())
	require.Error(t, c.call(create))
	require.Equal(t, 1, b.Live("w-0"), "it is billed, seen or not")
	_, err := c.lookup()
	require.NoError(t, err, "who has the lease does not look by label")
	after(b, 5*time.Second-1)
	require.Equal(t, "Ambiguous", class(create, c.call(create)))
	after(b, 1)
	require.NoError(t, c.call(create))
	require.Equal(t, 1, b.Created("w-0"))

	// A late machine that no settle time covers is never denied while it
	// lives, seen or not.
	late := newCaller(b, keyOf("w-1", 1))
	b.Script("w-1", create, Late(time.Minute))
	require.Error(t, late.call(create))
	after(b, time.Minute+time.Second)
	_, err = late.adopt()
	require.Equal(t, "Ambiguous", class(create, err))
	require.Equal(t, "Ambiguous", class(create, scripted(create, Definite())(late)))
	require.NoError(t, late.destroy())
	require.Zero(t, b.Live("w-1"))

	require.Equal(t, Config{}.Lag, New(Config{Class: Token}).config.Settle)
}

func TestSlowAndHangingEffectsStartTheSettleTime(t *testing.T) {
	b := New(Config{Class: Label, Lag: 5 * time.Second})
	c := newCaller(b, key)
	b.Script("w-0", create, Slow(time.Minute))
	done := make(chan error)
	go func() { done <- c.call(create) }()
	waitBlocked(b, 1)
	b.AdvanceTo(b.Now().Add(time.Minute))
	require.NoError(t, <-done)
	_, err := c.adopt()
	require.Equal(t, "Ambiguous", class(create, err))
}

// B4: AdoptOnly makes nothing, whatever is scripted.
func TestBackend_B4(t *testing.T) {
	for _, provider := range []Class{Token, Name, Label} {
		for _, text := range []string{"ok", "ok-no-endpoint", "definite", "capacity", "retry-after=1s", "error", "ambiguous", "done-ambiguous",
			"done-error", "late=1s", "panic", "done-panic", "lost", "dead", "vanish=1s", "spot-loss=1s", "refuse"} {
			outcomes, err := ParseOutcome(text)
			require.NoError(t, err)
			b := New(Config{Class: provider})
			b.Script("w-0", create, outcomes...)
			func() {
				defer func() { _ = recover() }()
				_, err = newCaller(b, key).adopt()
				require.Error(t, err, text)
			}()
			after(b, time.Hour)
			require.Zero(t, b.Created("w-0"), text)
		}
	}
}

// B5: what is absent can be cancelled and destroyed.
func TestBackend_B5(t *testing.T) {
	b := New(Config{})
	c := newCaller(b, key)
	require.NoError(t, c.cancel())
	require.NoError(t, c.destroy())
	c.upTo(t, destroy)
	require.Equal(t, 1, b.Remove("w-0"))
	require.Zero(t, b.Remove("w-0"))
	require.NoError(t, c.cancel())
	require.NoError(t, c.destroy())
	require.Zero(t, b.Destroyed("w-0"))
}

// What does not exist is a definite error, never a quiet success.
func TestStrictness(t *testing.T) {
	b := New(Config{ManualBootstrap: true})
	c := newCaller(b, key)
	for _, kind := range []provisioning.OperationKind{lookup, start, converge} {
		require.Equal(t, "Definite", class(kind, c.call(kind)), "%v before there is a machine", kind)
	}
	require.NoError(t, c.call(create))
	require.Equal(t, "Definite", class(converge, c.converge()), "before there is a session")
	_, err := b.StartBootstrap(context.Background(), provisioning.StartBootstrapRequest{Key: key, Lease: c.lease,
		Endpoint: provisioning.SSHEndpoint{Host: "elsewhere", Port: 22}})
	require.Equal(t, "Definite", class(start, err))
	require.NoError(t, c.call(start))
	require.NoError(t, c.cancel())
	require.Equal(t, "Definite", class(converge, c.converge()), "after the session was cancelled")
	session, err := c.start()
	require.NoError(t, err)
	require.NotEqual(t, c.session, session, "a session that has ended is not taken up again")
	require.Equal(t, session, b.SessionID(key))
	require.NoError(t, c.cancel(), "the old session is absent")
	require.True(t, b.SessionLive(key))
	c.lease = "of nobody"
	require.Equal(t, "Definite", class(lookup, c.call(lookup)))
}

// B7: a call that begins under a dead context does nothing and is none.
func TestBackend_B7(t *testing.T) {
	b := New(Config{})
	ctx, stop := context.WithCancel(context.Background())
	stop()
	_, err := b.CreateLease(ctx, provisioning.CreateLeaseRequest{Key: key})
	require.ErrorIs(t, err, provisioning.ErrNotStarted)
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, b.Calls("w-0", create))
	require.Zero(t, b.LiveTotal())
}

func TestJoin(t *testing.T) {
	t.Run("manual", func(t *testing.T) {
		b := New(Config{ManualBootstrap: true})
		c := newCaller(b, key)
		c.upTo(t, converge)
		after(b, time.Hour)
		require.Empty(t, *c.seen)
	})
	t.Run("a lost answer does not stop the bootstrap", func(t *testing.T) {
		b := New(Config{})
		c := newCaller(b, key)
		c.upTo(t, lookup)
		require.Error(t, scripted(start, DoneAmbiguous())(c))
		require.Len(t, *c.seen, 1)
	})
	t.Run("takes time", func(t *testing.T) {
		b := New(Config{JoinAfter: 70 * time.Second})
		first := newCaller(b, key)
		first.upTo(t, converge)
		after(b, 30*time.Second)
		var stages []provisioning.BootstrapStage
		for i, o := range *first.seen {
			require.Equal(t, provisioning.BootstrapProgress, o.Kind)
			require.Equal(t, uint64(i+1), o.StdoutSequence)
			stages = append(stages, o.Stage)
		}
		require.Equal(t, joinStages[:4], stages)
		second := newCaller(b, key) // a rebuilt host asks again and brings its own sink
		_, err := second.start()
		require.NoError(t, err)
		after(b, 40*time.Second-1)
		require.Len(t, *second.seen, 3)
		after(b, 1)
		require.Len(t, *first.seen, 4, "the newest sink is the one that counts")
		require.Equal(t, provisioning.SwactorJoined, (*second.seen)[3].Kind)
		after(b, time.Hour)
		require.Len(t, *second.seen, 4)
	})
	t.Run("an ended session says nothing", func(t *testing.T) {
		b := New(Config{JoinAfter: 70 * time.Second})
		c := newCaller(b, key)
		c.upTo(t, cancel)
		require.NoError(t, c.cancel())
		after(b, time.Hour)
		require.Empty(t, *c.seen)
	})
	t.Run("a late start keeps the newer sink", func(t *testing.T) {
		b := New(Config{JoinAfter: time.Hour})
		old := newCaller(b, key)
		old.upTo(t, lookup)
		require.Error(t, scripted(start, Late(time.Minute))(old))
		newer := newCaller(b, key)
		require.NoError(t, newer.call(start))
		after(b, 2*time.Hour)
		require.Empty(t, *old.seen)
		require.NotEmpty(t, *newer.seen)
	})
}

func TestScriptIsPerSlotAndOperation(t *testing.T) {
	b := New(Config{})
	b.Script("w-0", create, Definite(), Ambiguous())
	b.Script("w-0", create, Error())
	require.Equal(t, []Outcome{Definite(), Ambiguous(), Error()}, b.Scripted("w-0", create))
	require.NoError(t, newCaller(b, keyOf("w-1", 1)).call(create))
	require.Equal(t, "Definite", class(create, newCaller(b, keyOf("w-0", 1)).call(create)))
	require.Equal(t, "Ambiguous", class(create, newCaller(b, keyOf("w-0", 2)).call(create)), "of any attempt")
	require.Equal(t, []Outcome{Error()}, b.Scripted("w-0", create))
	require.Empty(t, b.Scripted("w-9", create))
	b.Script("w-1", destroy, Lost())
	b.ClearScripts()
	require.Empty(t, b.Scripted("w-0", create))
	require.Empty(t, b.Scripted("w-1", destroy))
	require.PanicsWithValue(t, "fakebackend: outcome dead is for CreateLease only, not for DestroyLease", func() { b.Script("w-0", destroy, Dead()) })
	require.PanicsWithValue(t, "fakebackend: outcome hang of CreateLease on w-0 would block an inline call for ever", func() {
		New(Config{Inline: true}).Script("w-0", create, Hang())
	})
}

func TestCallsAreWatched(t *testing.T) {
	var calls []Call
	b := New(Config{OnCall: func(c Call) { calls = append(calls, c) }})
	c := newCaller(b, key)
	begin := b.Now()
	require.Error(t, scripted(create, DoneError())(c))
	after(b, 7*time.Second)
	_, err := c.adopt()
	require.NoError(t, err)
	require.Equal(t, []Call{
		{Kind: create, Key: key, Outcome: DoneError(), StartedAt: begin},
		{Kind: create, Key: key, AdoptOnly: true, StartedAt: begin.Add(7 * time.Second)},
	}, calls)
	require.Equal(t, []time.Time{begin, begin.Add(7 * time.Second)}, b.CallTimes("w-0", create))

	// A call beside another one of the same key shows.
	b.Script("w-0", lookup, Hang())
	done := make(chan error)
	go func() { done <- c.call(lookup) }()
	waitBlocked(b, 1)
	require.NoError(t, c.call(destroy))
	require.Equal(t, 1, calls[len(calls)-1].Others)
	b.Close()
	require.Error(t, <-done)
	require.NoError(t, c.call(destroy))
	require.Zero(t, calls[len(calls)-1].Others)
}

func TestRefusing(t *testing.T) {
	b := New(Config{})
	var submitted []provisioning.Effect
	executor := b.Refusing(recorder{&submitted})
	effect := provisioning.NewEffect(provisioning.OperationID{Attempt: 1, Sequence: 1}, create, key, provisioning.LogicalNodeSpec{Node: "w-0"})
	b.Script("w-0", create, Refuse(), Definite(), Refuse())
	_, err := executor.Submit(effect)
	require.Error(t, err)
	queued, err := executor.Submit(effect)
	require.NoError(t, err)
	require.True(t, queued, "what the inner executor says is passed on")
	require.Len(t, submitted, 1)
	require.Equal(t, []Outcome{Definite(), Refuse()}, b.Scripted("w-0", create), "an outcome is used up by its call")
	require.Zero(t, b.Calls("w-0", create))
}

type recorder struct{ submitted *[]provisioning.Effect }

func (r recorder) Submit(effect provisioning.Effect) (bool, error) {
	*r.submitted = append(*r.submitted, effect)
	return true, nil
}
func (recorder) Expire(provisioning.OperationID) provisioning.Completion {
	return provisioning.Completion{}
}
func (recorder) Retire(provisioning.NodeAttemptID)   {}
func (recorder) Running() []provisioning.RunningCall { return nil }
