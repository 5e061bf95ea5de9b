//go:build linux

package backend

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

// controllerVariable makes the test program a controller that brings up one
// node, says so, and waits to be killed.
const (
	controllerVariable = "LOCALFLEET_TEST_CONTROLLER"
	runVariable        = "LOCALFLEET_TEST_RUN"
)

// quietAddress lets a controller come back to its port: nobody else here uses
// that address.
const quietAddress = "127.0.0.2:0"

func bootAndWait(dir string) {
	config := quick(dir)
	config.JoinAddress = quietAddress
	b, err := Open(config)
	if err == nil {
		var host *provisioning.Host
		host, err = provisioning.NewHost(provisioning.HostConfig{Shape: fleet(provisioning.RunID(os.Getenv(runVariable)), 1, 1), Backend: b, Retry: impatient})
		if err == nil {
			go host.Run(context.Background())
			err = host.WaitConverged(context.Background(), 1)
			fmt.Println(b.JoinAddr())
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	select {}
}

// Machine and agent know nothing of the death of their controller. Whoever
// comes after it finds them by their key and goes on where it was.
func TestControllerIsKilled(t *testing.T) {
	t.Parallel()
	config := quick(t.TempDir())
	config.Join.Silence = 500 * time.Millisecond
	program, err := os.Executable()
	require.NoError(t, err)
	controller := exec.Command(program)
	controller.Env = append(os.Environ(), controllerVariable+"="+config.Dir, runVariable+"="+string(runOf(t)))
	controller.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	controller.Stderr = os.Stderr
	stdout, err := controller.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, controller.Start())
	_, err = fmt.Fscanln(bufio.NewReader(stdout), &config.JoinAddress)
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(-controller.Process.Pid, syscall.SIGKILL))
	require.Error(t, controller.Wait())

	b := open(t, config)
	machines, err := b.provider.List()
	require.NoError(t, err)
	require.Len(t, machines, 1)
	a := newAttempt(t, b, machines[0].Key.Attempt, provisioning.BootSpec{})
	require.Equal(t, machines[0].Key, a.key)
	agent := a.agent()
	a.boot() // create, look-up and start all adopt
	require.Equal(t, machines[0].PID, a.machine().PID)
	require.Equal(t, agent, a.agent())
	a.join()
	require.NoError(t, a.converge())
	n, err := live(a.key)
	require.NoError(t, err)
	require.Equal(t, 1, n)

	require.NoError(t, syscall.Kill(agent, syscall.SIGKILL))
	a.seen.await(t, "the loss", kind(provisioning.NodeLost))
	require.NoError(t, a.destroy())
	n, err = live(a.key)
	require.NoError(t, err)
	require.Zero(t, n)
}
