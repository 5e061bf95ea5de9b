//go:build linux

package bootstrap

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

// A cancel that comes between the look at the machine and the start wins, and
// the start does not wait for an agent that will never be.
func TestCancelOvertakesStart(t *testing.T) {
	home := t.TempDir()
	job := &Job{Key: provisioning.ExternalKey{Run: "r", Node: "w-0", Attempt: 1}, Token: []byte("token"),
		Spec: provisioning.LogicalNodeSpec{Boot: provisioning.BootSpec{StartSwactorCommand: "touch started"}}}
	run := func(script string) int {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "/bin/sh", "-s")
		cmd.Env, cmd.Dir = []string{"HOME=" + home, "PATH=" + os.Getenv("PATH")}, home
		cmd.Stdin = strings.NewReader(script)
		cmd.Run() // its error is the status
		return cmd.ProcessState.ExitCode()
	}
	require.Zero(t, run(within(job.session(), cancelScript)))
	require.Equal(t, exitCancelled, run(job.start()))
	require.NoFileExists(t, home+"/started")
}
