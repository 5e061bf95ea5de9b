package join

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/swactor/provisioning"
)

// ErrRefused: the controller has turned the agent away.
var ErrRefused = errors.New("fleet: refused by the controller")

// Identity is what an agent joins with.
type Identity struct {
	Key     provisioning.ExternalKey
	Swactor provisioning.SwactorID
	Token   []byte
}

const dialTimeout = 5 * time.Second

// Keep joins, calls joined, and sends heartbeats until the connection is cut
// or ctx is done. The error wraps [ErrRefused] if it was turned away.
func Keep(ctx context.Context, address string, id Identity, joined func()) error {
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return keep(ctx, conn, id, joined)
}

func keep(ctx context.Context, conn net.Conn, id Identity, joined func()) error {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	w := newWire(conn)
	every, err := enter(w, id)
	if err != nil {
		return err
	}
	joined()
	cut := make(chan error, 1)
	go func() {
		var a answer
		cut <- w.receive(&a) // nothing is sent any more: this waits for the end
	}()
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for n := uint64(1); ; n++ {
		select {
		case <-ticker.C:
			if err := w.send(beat{Beat: n}); err != nil {
				return err
			}
		case err := <-cut:
			return fmt.Errorf("fleet: the controller hung up: %w", err)
		}
	}
}

func enter(w *wire, id Identity) (every time.Duration, err error) {
	if err := w.conn.SetDeadline(time.Now().Add(dialTimeout)); err != nil {
		return 0, err
	}
	var c challenge
	if err := w.receive(&c); err != nil {
		return 0, err
	}
	if err := w.send(hello{Key: id.Key, Swactor: id.Swactor, Proof: proof(id.Token, c.Nonce, id.Key, id.Swactor)}); err != nil {
		return 0, err
	}
	var a answer
	switch err := w.receive(&a); {
	case err != nil:
		return 0, err
	case a.Refused != "":
		return 0, fmt.Errorf("%w: %s", ErrRefused, a.Refused)
	case a.Heartbeat <= 0:
		return 0, errors.New("fleet: the controller named no time between heartbeats")
	}
	return a.Heartbeat, w.conn.SetDeadline(time.Time{})
}
