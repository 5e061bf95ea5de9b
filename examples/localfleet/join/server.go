package join

import (
	"cmp"
	"crypto/hmac"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/swactor/provisioning"
)

// Defaults of a [Config].
const (
	DefaultHeartbeat = time.Second
	DefaultSilence   = 5 * time.Second
	DefaultPatience  = 5 * time.Second

	// strangers bounds the connections that have proved nothing yet.
	strangers = 64
)

// Config configures a [Server]. Zero fields mean their defaults.
type Config struct {
	// Heartbeat is the time between two heartbeats of an agent, Silence how
	// long none may come before the node counts as lost. Defaults 1 s and
	// 5 s; Silence must be longer.
	Heartbeat, Silence time.Duration
	// Patience is how long a connection may take to prove who it is.
	// Default 5 s.
	Patience time.Duration
	// OnRefused is told who was turned away and why, which is more than the
	// one who was turned away hears. It is called from any goroutine.
	OnRefused func(Refusal)
}

// Refusal is somebody who was turned away. Key and Swactor are only what they
// said of themselves.
type Refusal struct {
	From    string
	Key     provisioning.ExternalKey
	Swactor provisioning.SwactorID
	Reason  error
}

// Reasons of a [Refusal].
var (
	ErrWrongToken    = errors.New("fleet: wrong join token")
	ErrUnknownSlot   = errors.New("fleet: nobody is expected from this slot")
	ErrOldAttempt    = errors.New("fleet: another attempt of this slot is expected")
	ErrAnotherJoined = errors.New("fleet: another agent has joined for this attempt")
	ErrLost          = errors.New("fleet: the node counts as lost")
	ErrCrowd         = errors.New("fleet: too many connections that have proved nothing")
	ErrNoHello       = errors.New("fleet: no proper hello")
)

// turnedAway is all that somebody hears who was: a guesser learns nothing
// from it.
const turnedAway = "turned away"

// Expectation is an attempt whose agent is expected.
type Expectation struct {
	// Token is the join token.
	Token []byte
	// Joined is called when the agent joins, and again when it joins again
	// after its connection was cut; Lost at most once, when it has been
	// silent for too long. Both are called from any goroutine, with no lock
	// held, and must not block.
	Joined func(provisioning.SwactorID)
	Lost   func(reason string)
}

// Member is an expected attempt and what was heard of it.
type Member struct {
	Key      provisioning.ExternalKey
	Swactor  provisioning.SwactorID // empty before it has joined
	JoinedAt time.Time
	HeardAt  time.Time
	Beats    uint64
	Lost     bool
}

// Server is the join listener of the controller.
type Server struct {
	config   Config
	listener net.Listener
	decoy    []byte // the token of attempts that nobody expects
	crowd    chan struct{}
	running  sync.WaitGroup

	mu      sync.Mutex
	members map[provisioning.ExternalKey]*member
	conns   map[net.Conn]bool
	closed  bool
}

type member struct {
	Member
	Expectation
	conn  net.Conn    // the live one
	alarm *time.Timer // runs from the first join on
}

// Listen begins to take joins at a TCP address.
func Listen(address string, config Config) (*Server, error) {
	s, err := newServer(config)
	if err != nil {
		return nil, err
	}
	if s.listener, err = net.Listen("tcp", address); err != nil {
		return nil, err
	}
	s.running.Go(s.accept)
	return s, nil
}

func newServer(config Config) (*Server, error) {
	config.Heartbeat = cmp.Or(config.Heartbeat, DefaultHeartbeat)
	config.Silence = cmp.Or(config.Silence, DefaultSilence)
	config.Patience = cmp.Or(config.Patience, DefaultPatience)
	if config.Heartbeat < 0 || config.Patience < 0 || config.Silence <= config.Heartbeat {
		return nil, fmt.Errorf("fleet: a silence of %v must be longer than the time between heartbeats, %v, and no time negative",
			config.Silence, config.Heartbeat)
	}
	return &Server{
		config: config, decoy: []byte(rand.Text()), crowd: make(chan struct{}, strangers),
		members: make(map[provisioning.ExternalKey]*member), conns: make(map[net.Conn]bool),
	}, nil
}

// Addr returns the address to join at.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Expect lets the agent of an attempt join. Of an attempt that is expected
// already it takes the new functions, and calls Joined if the agent has
// joined.
func (s *Server) Expect(key provisioning.ExternalKey, e Expectation) {
	s.mu.Lock()
	m := s.members[key]
	if m == nil {
		m = &member{Member: Member{Key: key}}
		s.members[key] = m
	}
	m.Expectation = e
	swactor := m.Swactor
	s.mu.Unlock()
	if swactor != "" {
		e.Joined(swactor)
	}
}

// Forget ends an attempt. Its agent is cut off, and neither of its functions
// is called by what happens later.
func (s *Server) Forget(key provisioning.ExternalKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.members[key]
	if m == nil {
		return
	}
	delete(s.members, key)
	m.stop()
}

func (m *member) stop() {
	if m.alarm != nil {
		m.alarm.Stop()
	}
	if m.conn != nil {
		m.conn.Close()
	}
}

// Members returns whoever is expected or has joined, in the order of run, slot
// name and attempt.
func (s *Server) Members() []Member {
	s.mu.Lock()
	defer s.mu.Unlock()
	members := make([]Member, 0, len(s.members))
	for _, m := range s.members {
		members = append(members, m.Member)
	}
	slices.SortFunc(members, func(a, b Member) int {
		return cmp.Or(cmp.Compare(a.Key.Run, b.Key.Run), cmp.Compare(a.Key.Node, b.Key.Node), cmp.Compare(a.Key.Attempt, b.Key.Attempt))
	})
	return members
}

// Close ends everything and waits for it. Agents go on and look for another
// controller.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	for _, m := range s.members {
		m.stop()
	}
	for conn := range s.conns {
		conn.Close()
	}
	s.mu.Unlock()
	var err error
	if s.listener != nil { // nil in tests without a network
		err = s.listener.Close()
	}
	s.running.Wait()
	if errors.Is(err, net.ErrClosed) { // by an earlier Close
		return nil
	}
	return err
}

func (s *Server) accept() {
	for {
		conn, err := s.listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // out of descriptors, or the caller is gone already
			time.Sleep(10 * time.Millisecond)
		default:
			s.take(conn)
		}
	}
}

// take serves a connection on a goroutine of its own.
func (s *Server) take(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		conn.Close()
		return
	}
	s.conns[conn] = true
	s.running.Go(func() { s.serve(conn) })
}

func (s *Server) serve(conn net.Conn) {
	defer func() {
		conn.Close()
		s.mu.Lock()
		delete(s.conns, conn)
		s.mu.Unlock()
	}()
	w := newWire(conn)
	select {
	case s.crowd <- struct{}{}:
	default:
		s.refuse(w, hello{}, ErrCrowd)
		return
	}
	m, key, swactor := s.greet(w)
	<-s.crowd
	if swactor == "" {
		return
	}
	m.Joined(swactor)
	for {
		var b beat
		if w.receive(&b) != nil || !s.heard(key, conn) {
			return // cut; if it stays away the alarm will tell
		}
	}
}

// greet lets somebody prove who it is, and takes it in. The name of the agent
// is empty if nothing came of it.
func (s *Server) greet(w *wire) (e Expectation, key provisioning.ExternalKey, swactor provisioning.SwactorID) {
	nonce := make([]byte, 32)
	rand.Read(nonce)
	if w.conn.SetDeadline(time.Now().Add(s.config.Patience)) != nil || w.send(challenge{Nonce: nonce}) != nil {
		return
	}
	var h hello
	err := w.receive(&h)
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrNoHello, err)
	} else {
		e, err = s.admit(w.conn, nonce, h)
	}
	if err != nil {
		s.refuse(w, h, err)
		return
	}
	if w.send(answer{Heartbeat: s.config.Heartbeat}) != nil || w.conn.SetDeadline(time.Time{}) != nil {
		return // cut; it will come again, or the alarm will tell
	}
	return e, h.Key, h.Swactor
}

// admit judges a hello. Nobody who has not proved to know the token gets as
// far as to be told apart.
func (s *Server) admit(conn net.Conn, nonce []byte, h hello) (Expectation, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, token := s.members[h.Key], s.decoy
	if m != nil {
		token = m.Token
	}
	known := hmac.Equal(h.Proof, proof(token, nonce, h.Key, h.Swactor)) // in constant time
	switch {
	case m == nil && s.expectsNode(h.Key):
		return Expectation{}, ErrOldAttempt
	case m == nil:
		return Expectation{}, ErrUnknownSlot
	case !known:
		return Expectation{}, ErrWrongToken
	case h.Swactor == "":
		return Expectation{}, ErrNoHello
	case m.Member.Lost:
		return Expectation{}, ErrLost
	case m.Swactor != "" && m.Swactor != h.Swactor:
		return Expectation{}, ErrAnotherJoined
	}
	if m.conn != nil {
		m.conn.Close() // cut without our having noticed
	}
	m.conn = conn
	m.HeardAt = time.Now()
	if m.Swactor == "" {
		m.Swactor, m.JoinedAt = h.Swactor, m.HeardAt
		m.alarm = time.AfterFunc(s.config.Silence, func() { s.silent(m) })
	} else {
		m.alarm.Reset(s.config.Silence)
	}
	return m.Expectation, nil
}

func (s *Server) expectsNode(key provisioning.ExternalKey) bool {
	for other := range s.members {
		if other.Run == key.Run && other.Node == key.Node {
			return true
		}
	}
	return false
}

// heard notes a heartbeat. It is false if it comes from a connection that
// counts no more.
func (s *Server) heard(key provisioning.ExternalKey, conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.members[key]
	if m == nil || m.conn != conn || m.Member.Lost {
		return false
	}
	m.HeardAt = time.Now()
	m.Beats++
	m.alarm.Reset(s.config.Silence)
	return true
}

// silent is called by the alarm of a member.
func (s *Server) silent(m *member) {
	s.mu.Lock()
	silence := time.Since(m.HeardAt)
	// The alarm may have gone off while it was put off, or ended.
	if s.closed || s.members[m.Key] != m || m.Member.Lost || silence < s.config.Silence {
		s.mu.Unlock()
		return
	}
	m.Member.Lost = true
	m.stop()
	lost := m.Expectation.Lost
	s.mu.Unlock()
	lost(fmt.Sprintf("no heartbeat of %s for %v", m.Swactor, silence.Round(time.Millisecond)))
}

func (s *Server) refuse(w *wire, h hello, reason error) {
	if s.config.OnRefused != nil {
		s.config.OnRefused(Refusal{From: w.conn.RemoteAddr().String(), Key: h.Key, Swactor: h.Swactor, Reason: reason})
	}
	// Best effort: whoever does not listen has been refused all the same.
	if w.conn.SetWriteDeadline(time.Now().Add(time.Second)) == nil {
		w.send(answer{Refused: turnedAway})
	}
}
