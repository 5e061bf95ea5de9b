package status

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"
)

//go:embed page.html
var page []byte

const (
	// pace is the least time between two pictures of the page, second the
	// most: its countdowns are part of the picture.
	pace   = 100 * time.Millisecond
	second = time.Second
	// maxFollowers bounds the pages that follow at once.
	maxFollowers = 32
	writeTimeout = 10 * time.Second
)

// ErrNotLoopback is the refusal of an address that other computers can reach.
var ErrNotLoopback = errors.New("fleet: the address is not one of loopback")

// Server serves the status page.
type Server struct {
	listener net.Listener
	http     *http.Server
	stop     context.CancelFunc
	served   chan error
}

// Serve serves the page of a fleet at a TCP address until Close. An address
// without a host is one of loopback, and one that is not is refused with
// [ErrNotLoopback] unless public is set: whoever reaches the page needs no
// password.
func Serve(address string, public bool, fleet *Fleet) (*Server, error) {
	address, err := loopback(address, public)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &Server{listener: listener, stop: stop, served: make(chan error, 1), http: &http.Server{
		Handler: Handler(fleet, public), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute,
		BaseContext: func(net.Listener) context.Context { return ctx },
	}}
	go func() { s.served <- s.http.Serve(listener) }()
	return s, nil
}

func loopback(address string, public bool) (string, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", fmt.Errorf("fleet: %q is not HOST:PORT: %w", address, err)
	}
	switch {
	case host == "" && !public:
		host = "127.0.0.1"
	case !public && !isLoopback(host):
		return "", fmt.Errorf("%w: %s; -http-public allows it", ErrNotLoopback, address)
	}
	return net.JoinHostPort(host, port), nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// URL returns where the page is.
func (s *Server) URL() string {
	address := s.listener.Addr().(*net.TCPAddr)
	host := address.IP.String()
	if address.IP.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, fmt.Sprint(address.Port)) + "/"
}

// Close ends all pages that follow, and waits for whatever is being answered
// until ctx is done.
func (s *Server) Close(ctx context.Context) error {
	s.stop()
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = errors.Join(err, s.http.Close())
	}
	if served := <-s.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

// Handler answers with the page at /, its events at /events, and /status,
// /healthz and /metrics. Nothing of it changes anything.
//
// Unless public is set it answers only requests for a loopback name, so that a
// page from elsewhere whose name was pointed to this computer sees nothing.
func Handler(fleet *Fleet, public bool) http.Handler {
	followers := make(chan struct{}, maxFollowers)
	policy := contentPolicy(page)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", policy)
		w.Write(page)
	})
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, fleet.Status())
	})
	mux.HandleFunc("GET /events", func(w http.ResponseWriter, r *http.Request) {
		select {
		case followers <- struct{}{}:
			defer func() { <-followers }()
			follow(w, r, fleet)
		default:
			http.Error(w, "too many pages follow already", http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if fleet.Ended != nil {
			if err := fleet.Ended(); err != nil {
				w.WriteHeader(http.StatusServiceUnavailable)
				fmt.Fprintln(w, "not driving:", err)
				return
			}
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		fleet.writeMetrics(w) // an error is that of a client that has gone
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = r.Host
		}
		if !public && !isLoopback(host) {
			http.Error(w, "this page is for this computer only", http.StatusForbidden)
			return
		}
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		mux.ServeHTTP(w, r)
	})
}

func writeJSON(w http.ResponseWriter, code int, value any) {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	w.Write(append(text, '\n'))
}

// follow sends a status whenever something has changed, as server-sent events.
func follow(w http.ResponseWriter, r *http.Request, fleet *Fleet) {
	out := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	for {
		changed := fleet.Journal.Changed() // before the look: nothing slips between
		text, err := json.Marshal(fleet.Status())
		if err != nil {
			return
		}
		// The connection of a reader that does not read is cut.
		if out.SetWriteDeadline(time.Now().Add(writeTimeout)) != nil {
			return
		}
		if _, err := fmt.Fprintf(w, "data: %s\n\n", text); err != nil || out.Flush() != nil {
			return
		}
		if !sleep(r.Context(), pace, nil) || !sleep(r.Context(), second-pace, changed) {
			return
		}
	}
}

// sleep is false if ctx ended it.
func sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-wake:
	case <-ctx.Done():
		return false
	}
	return true
}

// contentPolicy allows the one script and the one style of the page, by their
// hashes, and asking this server; nothing else, whatever gets into the page.
func contentPolicy(page []byte) string {
	hash := func(tag string) string {
		_, rest, _ := bytes.Cut(page, []byte("<"+tag+">"))
		text, _, _ := bytes.Cut(rest, []byte("</"+tag+">"))
		sum := sha256.Sum256(text)
		return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
	}
	return "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src data:" +
		"; script-src " + hash("script") + "; style-src " + hash("style")
}
