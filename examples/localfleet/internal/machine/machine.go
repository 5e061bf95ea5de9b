package machine

import (
	"bytes"
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/atomicfile"
	"github.com/swactor/provisioning/examples/localfleet/internal/osproc"
)

// Run plays the machine of a directory until it is killed.
func Run(dir Dir) error {
	osproc.CloseOnExec(LockDescriptor) // commands must not keep the machine alive
	if err := osproc.Detach(); err != nil {
		return err
	}
	var order Order
	if err := atomicfile.ReadJSON(dir.Order(), &order); err != nil {
		return err
	}
	if os.Getenv(osproc.TokenVariable) != order.Key.Token() {
		return fmt.Errorf("localfleet: a machine needs %s, which its processes are known by", osproc.TokenVariable)
	}
	record := Record{PID: os.Getpid(), StartedAt: time.Now().UTC()}
	if err := atomicfile.WriteJSON(dir.Record(), record); err != nil {
		return err
	}
	log.Printf("booting image %q for %v", order.Image, order.BootDelay)
	if order.Lifetime > 0 {
		time.AfterFunc(order.Lifetime, func() {
			log.Printf("the lifetime of %v is over", order.Lifetime)
			log.Print(osproc.KillGroup(record.PID)) // prints only if it failed
		})
	}
	time.Sleep(order.BootDelay) // a machine has nothing else to do

	config, err := serverConfig(dir, order)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	address := listener.Addr().(*net.TCPAddr)
	record.Endpoint = &provisioning.SSHEndpoint{Host: address.IP.String(), Port: uint16(address.Port)}
	if err := atomicfile.WriteJSON(dir.Record(), record); err != nil {
		return errors.Join(err, listener.Close())
	}
	log.Printf("listening on %v", record.Endpoint)
	s := &server{config: config, home: dir.Home(), environment: []string{
		"HOME=" + dir.Home(),
		"PATH=" + dir.Bin() + string(os.PathListSeparator) + os.Getenv("PATH"),
		"USER=" + order.User,
		"LOCALFLEET_IMAGE=" + order.Image,
		osproc.TokenVariable + "=" + order.Key.Token(),
	}}
	return s.serve(listener)
}

func serverConfig(dir Dir, order Order) (*ssh.ServerConfig, error) {
	pem, err := os.ReadFile(dir.HostKey())
	if err != nil {
		return nil, err
	}
	hostKey, err := ssh.ParsePrivateKey(pem)
	if err != nil {
		return nil, err
	}
	authorized, _, _, _, err := ssh.ParseAuthorizedKey([]byte(order.AuthorizedKey))
	if err != nil {
		return nil, err
	}
	config := &ssh.ServerConfig{
		ServerVersion: "SSH-2.0-localfleet",
		PublicKeyCallback: func(c ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			if c.User() != order.User || !bytes.Equal(key.Marshal(), authorized.Marshal()) {
				return nil, fmt.Errorf("localfleet: %q may not log in with this key", c.User())
			}
			return nil, nil
		},
	}
	config.AddHostKey(hostKey)
	return config, nil
}
