// Package hosts is what is done on the hosts of an inventory: claims on them,
// and agents under a claim. All of it is small scripts for the POSIX shell of a
// host; nothing has to be installed there.
package hosts

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/swactor/provisioning/examples/localfleet/remote"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

// Defaults of a [Config].
const (
	DefaultMaxDials = 16
	DefaultRedial   = 2 * time.Second
	// hold is how long a connection that is being made counts as one. A host
	// that answers takes less, and one that keeps silent is in nobody's way
	// after it.
	hold = time.Second
	// silence is how long a host that said nothing until the ConnectTimeout is
	// left alone at least: it takes that long to ask it.
	silence = 30 * time.Second

	// scripts bounds those that run on a host at once. OpenSSH allows 10
	// sessions to a connection, and those of followers come on top.
	scripts = 6
)

// Config says how to reach hosts. Zero fields mean their defaults.
type Config struct {
	// SSH holds the times; the key is that of each host.
	SSH remote.Config
	// MaxDials bounds the connections that are being made at once, those left
	// out that have been silent for a second. Default 16. There is at most one
	// to each host.
	MaxDials int
	// Redial is how long a host that could not be reached is left alone: who
	// asks meanwhile hears the same again at once. Default 2 s. One that said
	// nothing in time is left alone for 30 s, if that is longer.
	Redial time.Duration
	// Claiming is called before a claim is made on a host, where there is a
	// directory of claims by then. Its error keeps the claim from being made.
	// It may be nil.
	Claiming func(*inventory.Host) error
}

// ErrClosed: the [Pool] is closed.
var ErrClosed = errors.New("sshfleet: the connections are closed")

// Pool has the connections, one to each host that was asked for. Its methods
// are safe for concurrent use.
type Pool struct {
	config Config
	dials  chan struct{} // one value for each that is being made
	hold   time.Duration // for at most so long

	ctx     context.Context // until Close
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu     sync.Mutex
	closed bool
	links  map[string]*link // by the name of the host
}

// link is a connection to a host, or the failure to make one.
type link struct {
	ready    chan struct{} // closed when the rest is set
	conn     *remote.Conn
	err      error
	failedAt time.Time
	scripts  chan struct{} // one value for each that runs
}

// NewPool returns a pool without a connection.
func NewPool(config Config) *Pool {
	config.MaxDials = cmp.Or(config.MaxDials, DefaultMaxDials)
	config.Redial = cmp.Or(config.Redial, DefaultRedial)
	p := &Pool{config: config, dials: make(chan struct{}, config.MaxDials), hold: hold, links: make(map[string]*link)}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p
}

// Close cuts all connections and waits for their goroutines.
func (p *Pool) Close() {
	p.mu.Lock()
	p.closed = true
	links := p.links
	p.links = nil
	p.mu.Unlock()
	p.cancel()
	for _, l := range links {
		<-l.ready
		if l.conn != nil {
			l.conn.Close()
		}
	}
	p.running.Wait()
}

// link returns the living connection to a host. A connection is everybody's:
// it does not end with the ctx of whoever asked first.
func (p *Pool) link(ctx context.Context, h *inventory.Host) (*link, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, ErrClosed
	}
	l := p.links[h.Name]
	if l == nil || l.over(p.config.Redial) {
		old := l
		l = &link{ready: make(chan struct{}), scripts: make(chan struct{}, scripts)}
		p.links[h.Name] = l
		p.running.Go(func() {
			if old != nil && old.conn != nil {
				old.conn.Close() // it is cut, what is left are its goroutines
			}
			p.dial(l, h)
		})
	}
	p.mu.Unlock()
	select {
	case <-l.ready:
		return l, l.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// over reports that a new connection has to be made.
func (l *link) over(redial time.Duration) bool {
	select {
	case <-l.ready:
	default:
		return false
	}
	if l.err != nil {
		if errors.Is(l.err, context.DeadlineExceeded) {
			redial = max(redial, silence)
		}
		return time.Since(l.failedAt) >= redial
	}
	select {
	case <-l.conn.Cut():
		return true
	default:
		return false
	}
}

func (p *Pool) dial(l *link, h *inventory.Host) {
	defer close(l.ready)
	select {
	case p.dials <- struct{}{}:
		release := sync.OnceFunc(func() { <-p.dials })
		defer release()
		defer time.AfterFunc(p.hold, release).Stop()
		config := p.config.SSH
		config.Key = h.Key
		l.conn, l.err = remote.Dial(p.ctx, config, remote.Target{Endpoint: h.Endpoint, User: h.User, HostKeys: h.HostKeys})
	case <-p.ctx.Done():
		l.err = ErrClosed
	}
	if l.err != nil {
		l.failedAt = time.Now()
	}
}

// Cut cuts the connection to a host, as a network does. It is false if there
// is none.
func (p *Pool) Cut(host string) bool {
	p.mu.Lock()
	l := p.links[host]
	p.mu.Unlock()
	if l == nil || l.over(0) {
		return false
	}
	<-l.ready
	if l.conn == nil {
		return false
	}
	l.conn.Close()
	return true
}

// Reach connects to a host, if there is no connection.
func (p *Pool) Reach(ctx context.Context, h *inventory.Host) error {
	if _, err := p.link(ctx, h); err != nil {
		return fmt.Errorf("sshfleet: host %s: %w", h.Name, err)
	}
	return nil
}
