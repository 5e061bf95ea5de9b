package join

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

var (
	token = []byte("a token that nobody guesses")
	key   = provisioning.ExternalKey{Run: "r", Node: "w-0", Attempt: 2}
)

// stage is a server without a network, in virtual time, and what it reported.
type stage struct {
	*Server
	t        *testing.T
	mu       sync.Mutex
	joins    []provisioning.SwactorID
	losses   []string
	refusals []error
}

// play runs a test in a bubble with a server that expects key.
func play(t *testing.T, test func(t *testing.T, s *stage)) {
	synctest.Test(t, func(t *testing.T) {
		s := &stage{t: t}
		var err error
		s.Server, err = newServer(Config{OnRefused: func(r Refusal) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.refusals = append(s.refusals, r.Reason)
		}})
		require.NoError(t, err)
		s.expect(key)
		test(t, s)
		require.NoError(t, s.Close())
	})
}

func (s *stage) expect(key provisioning.ExternalKey) {
	s.Expect(key, Expectation{
		Token: token,
		Joined: func(swactor provisioning.SwactorID) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.joins = append(s.joins, swactor)
		},
		Lost: func(reason string) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.losses = append(s.losses, reason)
		},
	})
}

// What was reported so far, once nothing moves any more.

func (s *stage) joined() []provisioning.SwactorID { return told(s, &s.joins) }
func (s *stage) lost() []string                   { return told(s, &s.losses) }
func (s *stage) refused() []error                 { return told(s, &s.refusals) }

func told[T any](s *stage, list *[]T) []T {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(*list)
}

// agent joins with id and keeps joined until leave is called, which returns
// why it ended.
func (s *stage) agent(id Identity) (leave func() error) {
	ctx, cancel := context.WithCancel(s.t.Context())
	ours, theirs := net.Pipe()
	ended := make(chan error, 1)
	s.take(theirs)
	go func() { ended <- keep(ctx, ours, id, func() {}) }()
	synctest.Wait()
	return func() error {
		cancel()
		err := <-ended
		synctest.Wait()
		return err
	}
}

func id() Identity { return Identity{Key: key, Swactor: "a", Token: token} }

func TestAgentJoinsAndIsHeard(t *testing.T) {
	play(t, func(t *testing.T, s *stage) {
		began := time.Now()
		leave := s.agent(id())
		require.Equal(t, []provisioning.SwactorID{"a"}, s.joined())
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Equal(t, []Member{{Key: key, Swactor: "a", JoinedAt: began, HeardAt: time.Now(), Beats: 3600}}, s.Members())
		require.Empty(t, s.lost(), "who is heard is not lost")
		require.Error(t, leave())
	})
}

// The moment of the loss is that of the last heartbeat and the silence, and it
// is told once.
func TestSilenceIsALoss(t *testing.T) {
	play(t, func(t *testing.T, s *stage) {
		leave := s.agent(id())
		time.Sleep(10*time.Second + time.Millisecond)
		leave()
		time.Sleep(DefaultSilence - 2*time.Millisecond)
		synctest.Wait()
		require.Empty(t, s.lost())
		time.Sleep(time.Millisecond)
		synctest.Wait()
		require.Equal(t, []string{"no heartbeat of a for 5s"}, s.lost())
		require.True(t, s.Members()[0].Lost)

		// Too late.
		require.ErrorIs(t, s.agent(id())(), ErrRefused)
		require.ErrorIs(t, s.refused()[0], ErrLost)
		time.Sleep(time.Hour)
		require.Len(t, s.lost(), 1)
	})
}

// A cut connection is none, if the agent comes back before the silence is over.
func TestAgentComesBack(t *testing.T) {
	play(t, func(t *testing.T, s *stage) {
		s.agent(id())()
		time.Sleep(DefaultSilence - time.Millisecond)
		leave := s.agent(id())
		require.Equal(t, []provisioning.SwactorID{"a", "a"}, s.joined())
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Empty(t, s.lost())
		leave()
	})
}

// It may come back before anybody has noticed that it was gone.
func TestNewConnectionReplacesTheOld(t *testing.T) {
	play(t, func(t *testing.T, s *stage) {
		first := s.agent(id())
		second := s.agent(id())
		require.ErrorContains(t, first(), "the controller hung up")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Empty(t, s.lost())
		require.EqualValues(t, 60, s.Members()[0].Beats)
		second()
	})
}

func TestWhoIsTurnedAway(t *testing.T) {
	with := func(change func(*Identity)) Identity {
		i := id()
		change(&i)
		return i
	}
	for name, c := range map[string]struct {
		id     Identity
		reason error
	}{
		"wrong token":           {with(func(i *Identity) { i.Token = []byte("a token that nobody guesse") }), ErrWrongToken},
		"no token":              {with(func(i *Identity) { i.Token = nil }), ErrWrongToken},
		"wrong slot":            {with(func(i *Identity) { i.Key.Node = "w-1" }), ErrUnknownSlot},
		"slot of a longer name": {with(func(i *Identity) { i.Key.Node = "w-00" }), ErrUnknownSlot},
		"another run":           {with(func(i *Identity) { i.Key.Run = "q" }), ErrUnknownSlot},
		"earlier attempt":       {with(func(i *Identity) { i.Key.Attempt-- }), ErrOldAttempt},
		"later attempt":         {with(func(i *Identity) { i.Key.Attempt++ }), ErrOldAttempt},
		"no name":               {with(func(i *Identity) { i.Swactor = "" }), ErrNoHello},
	} {
		t.Run(name, func(t *testing.T) {
			play(t, func(t *testing.T, s *stage) {
				err := s.agent(c.id)()
				require.ErrorIs(t, err, ErrRefused)
				require.ErrorContains(t, err, turnedAway, "it is told nothing else")
				require.Len(t, s.refused(), 1)
				require.ErrorIs(t, s.refused()[0], c.reason)
				require.Empty(t, s.joined())
				require.Empty(t, s.Members()[0].Swactor)
			})
		})
	}
}

func TestSecondAgentOfAnAttempt(t *testing.T) {
	play(t, func(t *testing.T, s *stage) {
		leave := s.agent(id())
		other := id()
		other.Swactor = "b"
		require.ErrorIs(t, s.agent(other)(), ErrRefused)
		require.ErrorIs(t, s.refused()[0], ErrAnotherJoined)
		require.Equal(t, []provisioning.SwactorID{"a"}, s.joined())
		leave()
	})
}

func TestRetiredAttempt(t *testing.T) {
	play(t, func(t *testing.T, s *stage) {
		leave := s.agent(id())
		s.Forget(key)
		require.ErrorContains(t, leave(), "the controller hung up")
		next := key
		next.Attempt++
		s.expect(next)
		require.ErrorIs(t, s.agent(id())(), ErrRefused)
		require.ErrorIs(t, s.refused()[0], ErrOldAttempt)
		time.Sleep(time.Hour)
		require.Empty(t, s.lost(), "of an attempt that is forgotten nothing is told")
	})
}

func TestExpectAgainTellsTheJoinAgain(t *testing.T) {
	play(t, func(t *testing.T, s *stage) {
		leave := s.agent(id())
		s.expect(key)
		require.Equal(t, []provisioning.SwactorID{"a", "a"}, s.joined())
		leave()
	})
}

// What was heard of one join does not open the door again: not for the same
// words to another nonce, not for another name to the same one.
func TestProofIsOfOneJoin(t *testing.T) {
	nonce := []byte("nonce")
	valid := proof(token, nonce, key, "a")
	other := key
	other.Attempt++
	for _, p := range [][]byte{
		proof(token, []byte("noncf"), key, "a"), proof(token, nonce, key, "b"), proof(token, nonce, other, "a"),
		proof(token, nonce, provisioning.ExternalKey{Run: "rw", Node: "-0", Attempt: 2}, "a"), proof(nil, nonce, key, "a"),
	} {
		require.NotEqual(t, valid, p)
	}
	play(t, func(t *testing.T, s *stage) {
		ours, theirs := net.Pipe()
		s.take(theirs)
		w := newWire(ours)
		var c challenge
		require.NoError(t, w.receive(&c))
		require.NoError(t, w.send(hello{Key: key, Swactor: "a", Proof: valid}))
		var a answer
		require.NoError(t, w.receive(&a))
		require.Equal(t, answer{Refused: turnedAway}, a)
		ours.Close()
		synctest.Wait()
		require.ErrorIs(t, s.refused()[0], ErrWrongToken)
	})
}

// Nobody holds a place by saying nothing, too much, or nonsense.
func TestStrangers(t *testing.T) {
	for name, say := range map[string]string{
		"nothing":  "",
		"too much": strings.Repeat("x", longestLine+1),
		"nonsense": "GET / HTTP/1.1\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			play(t, func(t *testing.T, s *stage) {
				began := time.Now()
				ours, theirs := net.Pipe()
				s.take(theirs)
				w := newWire(ours)
				require.NoError(t, w.receive(&challenge{}))
				go fmt.Fprint(ours, say)
				for err := error(nil); err == nil; { // until it hangs up
					err = w.receive(&answer{})
				}
				require.LessOrEqual(t, time.Since(began), DefaultPatience+time.Second)
				synctest.Wait()
				require.ErrorIs(t, s.refused()[0], ErrNoHello)
				require.Empty(t, s.conns)
				ours.Close()
			})
		})
	}
}

func TestCrowdOfStrangers(t *testing.T) {
	play(t, func(t *testing.T, s *stage) {
		var conns []net.Conn
		for range strangers + 1 {
			ours, theirs := net.Pipe()
			s.take(theirs)
			conns = append(conns, ours)
			synctest.Wait()
		}
		var a answer
		require.NoError(t, newWire(conns[strangers]).receive(&a))
		require.Equal(t, turnedAway, a.Refused)
		require.ErrorIs(t, s.refused()[0], ErrCrowd)
		for _, c := range conns {
			c.Close()
		}
		synctest.Wait()
		leave := s.agent(id())
		require.Len(t, s.joined(), 1, "there is room again")
		leave()
	})
}

// Close ends everything, and nothing is told after it.
func TestCloseIsSilent(t *testing.T) {
	play(t, func(t *testing.T, s *stage) {
		leave := s.agent(id())
		require.NoError(t, s.Close())
		require.ErrorContains(t, leave(), "the controller hung up")
		time.Sleep(time.Hour)
		require.Empty(t, s.lost())
		ours, theirs := net.Pipe()
		s.take(theirs)
		require.Error(t, newWire(ours).receive(&challenge{}))
	})
}

func TestConfigIsJudged(t *testing.T) {
	for _, c := range []Config{{Heartbeat: -1}, {Patience: -1}, {Heartbeat: time.Second, Silence: time.Second}, {Heartbeat: time.Minute}} {
		_, err := Listen("127.0.0.1:0", c)
		require.ErrorContains(t, err, "silence")
	}
}

// The same over a network.
func TestListen(t *testing.T) {
	s, err := Listen("127.0.0.1:0", Config{})
	require.NoError(t, err)
	joined := make(chan provisioning.SwactorID, 1)
	s.Expect(key, Expectation{Token: token, Joined: func(id provisioning.SwactorID) { joined <- id }, Lost: func(string) {}})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	welcome := make(chan struct{})
	go func() { ended <- Keep(ctx, s.Addr(), id(), func() { close(welcome) }) }()
	require.EqualValues(t, "a", <-joined)
	<-welcome
	cancel()
	require.Error(t, <-ended)
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	require.Error(t, Keep(t.Context(), s.Addr(), id(), func() {}), "nobody listens")
}
