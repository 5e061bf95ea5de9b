package machine

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"
)

const (
	handshakeTimeout = 10 * time.Second
	// drain is how long the output of a command is read after its end: what
	// it left running in the background may hold the pipe open for ever.
	drain = time.Second
)

// server is an SSH server that can do one thing: run a command.
type server struct {
	config      *ssh.ServerConfig
	home        string
	environment []string
}

func (s *server) serve(listener net.Listener) error {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		go s.connection(conn)
	}
}

func (s *server) connection(conn net.Conn) {
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return
	}
	client, channels, requests, err := ssh.NewServerConn(conn, s.config)
	if err != nil {
		if !errors.Is(err, io.EOF) { // a probe reads the banner and goes
			log.Printf("handshake with %v: %v", conn.RemoteAddr(), err)
		}
		return
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return
	}
	log.Printf("%s logged in from %v", client.User(), client.RemoteAddr())
	go ssh.DiscardRequests(requests) // a refused keep-alive is an answer too
	for fresh := range channels {
		if fresh.ChannelType() != "session" {
			fresh.Reject(ssh.UnknownChannelType, "only sessions")
			continue
		}
		channel, requests, err := fresh.Accept()
		if err != nil {
			return
		}
		go s.session(channel, requests)
	}
}

// session runs the command of one channel and kills it when the channel is
// closed or cut before its end.
func (s *server) session(channel ssh.Channel, requests <-chan *ssh.Request) {
	ctx, kill := context.WithCancel(context.Background())
	defer kill()
	running := false
	for request := range requests {
		var exec struct{ Command string }
		ok := !running && request.Type == "exec" && ssh.Unmarshal(request.Payload, &exec) == nil
		if request.WantReply {
			request.Reply(ok, nil)
		}
		if ok {
			running = true
			go s.run(ctx, channel, exec.Command)
		}
	}
	if !running {
		channel.Close()
	}
}

func (s *server) run(ctx context.Context, channel ssh.Channel, command string) {
	defer channel.Close()
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", command)
	cmd.Dir, cmd.Env = s.home, s.environment
	cmd.Stdout, cmd.Stderr = channel, channel.Stderr()
	cmd.WaitDelay = drain
	// Not cmd.Stdin: Wait would wait for the client to close it.
	stdin, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		log.Printf("cannot run a command: %v", err)
		sendStatus(channel, 127)
		return
	}
	go func() {
		io.Copy(stdin, channel) // ends at the latest when the channel is closed
		stdin.Close()
	}()
	if err := cmd.Wait(); err != nil && cmd.ProcessState == nil {
		log.Printf("cannot wait for a command: %v", err)
	}
	status := 255
	if state := cmd.ProcessState; state != nil {
		status = state.ExitCode()
		if waited, ok := state.Sys().(syscall.WaitStatus); ok && waited.Signaled() {
			status = 128 + int(waited.Signal()) // as a shell would say
		}
	}
	sendStatus(channel, uint32(status))
}

// sendStatus tells a client that may have gone.
func sendStatus(channel ssh.Channel, status uint32) {
	channel.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{status}))
}
