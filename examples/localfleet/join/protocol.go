// Package join is how agents join the swarm: a listener on the controller, to
// which an agent proves that it knows the join token and then sends
// heartbeats, and the agent's side of it.
//
// A line of JSON each way, then heartbeats:
//
//	controller  {"nonce": ...}
//	agent       {"key": ..., "swactor": ..., "proof": ...}
//	controller  {"heartbeat": ...} or {"refused": "..."}
//	agent       {"beat": 1}, {"beat": 2}, ...
//
// The proof is an HMAC under the join token over the nonce and over who the
// agent says it is, so that the token itself is never sent, and what was heard
// on the wire is of no use for another join or another slot. The lines are not
// encrypted: beyond one computer, put TLS around them.
package join

import (
	"bufio"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"net"
	"time"

	"github.com/swactor/provisioning"
)

// longestLine bounds what is read from somebody who has proved nothing: two
// names of 253 bytes and a little more, escaped.
const longestLine = 8 << 10

type challenge struct {
	Nonce []byte `json:"nonce"`
}

type hello struct {
	Key     provisioning.ExternalKey `json:"key"`
	Swactor provisioning.SwactorID   `json:"swactor"`
	Proof   []byte                   `json:"proof"`
}

type answer struct {
	Heartbeat time.Duration `json:"heartbeat,omitempty"` // the time between two
	Refused   string        `json:"refused,omitempty"`
}

type beat struct {
	Beat uint64 `json:"beat"`
}

// proof is what only somebody who knows the token can say to a nonce.
func proof(token, nonce []byte, key provisioning.ExternalKey, swactor provisioning.SwactorID) []byte {
	h := hmac.New(sha256.New, token)
	for _, field := range [][]byte{
		[]byte("localfleet join v1"), nonce, []byte(key.Run), []byte(key.Node),
		binary.BigEndian.AppendUint64(nil, uint64(key.Attempt)), []byte(swactor),
	} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(field)))) // so that no two lists run together
		h.Write(field)
	}
	return h.Sum(nil)
}

var errLongLine = errors.New("fleet: the line is too long")

// wire sends and receives lines of JSON.
type wire struct {
	conn net.Conn
	in   *bufio.Reader
}

func newWire(conn net.Conn) *wire { return &wire{conn, bufio.NewReaderSize(conn, longestLine)} }

func (w *wire) send(message any) error {
	line, err := json.Marshal(message)
	if err != nil {
		return err
	}
	_, err = w.conn.Write(append(line, '\n'))
	return err
}

func (w *wire) receive(message any) error {
	line, err := w.in.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		return errLongLine
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(line, message)
}
