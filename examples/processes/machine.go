//go:build unix

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/swactor/provisioning"
)

// machineArgument makes this program play a machine instead of renting some.
const machineArgument = "play-a-machine"

const (
	portFile    = "port" // in the machine's directory, once it listens
	welcomeWord = "welcome"
)

// order is what a bootstrap tells a machine: start your agent, and let it say
// Hello at Home.
type order struct {
	Home  string
	Hello hello
}

// hello is how an agent proves who it is.
type hello struct {
	Token   string
	Node    provisioning.LogicalNodeID
	Attempt provisioning.NodeAttemptID
	Secret  string
}

// playMachine lives until it is killed or whoever started it is gone.
func playMachine(dir string) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	// Renamed into place, so that nobody reads half a number.
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	draft := filepath.Join(dir, portFile+".new")
	if err := os.WriteFile(draft, []byte(port), 0o600); err != nil {
		return err
	}
	if err := os.Rename(draft, filepath.Join(dir, portFile)); err != nil {
		return err
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			go takeOrder(conn, filepath.Base(dir))
		}
	}()
	_, err = io.Copy(io.Discard, os.Stdin) // ends with the parent
	return err
}

// takeOrder serves one connection: a bootstrap, or a probe that says nothing.
// A port may have been that of another machine before, so an order has to be
// for the token of this one (B8).
func takeOrder(conn net.Conn, token string) {
	defer conn.Close()
	var o order
	if err := json.NewDecoder(conn).Decode(&o); err != nil || o.Hello.Token != token {
		return
	}
	fmt.Fprintln(conn, "started")
	if err := join(o); err != nil {
		return // the cut connection tells
	}
	io.Copy(io.Discard, conn) // until the session is closed; the agent lives on
}

// join is all that the agent of this example does.
func join(o order) error {
	home, err := net.Dial("tcp", o.Home)
	if err != nil {
		return err
	}
	defer home.Close()
	if err := json.NewEncoder(home).Encode(o.Hello); err != nil {
		return err
	}
	answer, err := bufio.NewReader(home).ReadString('\n')
	if err == nil && strings.TrimSpace(answer) != welcomeWord {
		err = errors.New("processes: turned away")
	}
	return err
}
